"""`python -m engine.show out.jsonl`: the rows of an output file for reading, in input order."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(path: Path) -> None:
    """Print each row's id, how it ended, and its text."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    for row in sorted(rows, key=lambda row: row["index"]):
        click.echo(describe(row))


def describe(row: dict) -> str:
    """A heading and the text or the error of one output row, plain or in the OpenAI shape."""
    name = row.get("custom_id", row.get("id", f"row {row['index']}"))
    if "response" in row:
        return _describe_openai(name, row)
    if row["status"] == "error":
        return f"== {name}: error {row['error']['code']}\n{row['error']['message']}\n"
    texts = row["text"] if isinstance(row["text"], list) else [row["text"]]
    reasons = row["finish_reason"] if isinstance(row["finish_reason"], list) else [row["finish_reason"]]
    head = f"== {name}: {', '.join(reasons)}, {row['prompt_tokens']} + {row['completion_tokens']} tokens"
    return "\n".join([head, *(text.strip("\n") for text in texts), ""])


def _describe_openai(name: object, row: dict) -> str:
    body = row["response"]["body"]
    if row["error"] is not None:
        return f"== {name}: error {row['error']['code']}\n{row['error']['message']}\n"
    texts = [choice.get("text") or choice.get("message", {}).get("content", "") for choice in body["choices"]]
    reasons = ", ".join(choice["finish_reason"] for choice in body["choices"])
    usage = body["usage"]
    head = f"== {name}: {reasons}, {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
    return "\n".join([head, *texts, ""])


if __name__ == "__main__":
    show()
