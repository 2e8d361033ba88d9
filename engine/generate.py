"""The command: `python -m engine.generate` alone, or under torchrun with one process a GPU (or a few on a CPU).

This file is the list of options. Nothing heavy is imported until they have been read, so `--help` and a typing slip answer at
once. What happens with them is in `engine.run`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import NoReturn

import click

from comm.choice_table import FORCED
from engine.command import CommandOptions
from engine.settings import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_SPECULATIVE_ROWS,
    DRAFT_PLACEMENTS,
    DRAFT_WAITS,
    MAX_ADAPTIVE_DRAFTS,
    MAX_NUM_DRAFTS,
)
from launch.comm_policy import NAMES
from launch.environment import Environment
from launch.errors import DoorbellError
from launch.exits import LastingStderr, describe_signal, end_process, leave, report
from launch.signals import SignalNote, end_with_parent

EPILOG = """\b
Flags that show no default are off.
\b
Exit codes: 0 all rows answered, 2 usage, 3 model or configuration, 4 some rows failed, 5 a peer was lost,
6 output not written, 130 interrupted, 143 terminated, 1 a bug. torchrun itself turns any failure into 1; the code
also stands in rank 0's last line and in OUTPUT.meta.json.
\b
Rates: prefill tok/s are prompt tokens per second of prefill; decode tok/s are tokens produced by decode steps per
second of decode. A step that holds both is shared out by its tokens."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


class ByteSize(click.ParamType):
    """A number of bytes, with an optional K, M, G or T (powers of 1024)."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write it like 512M or 2.5GiB", param, ctx)
        return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


class Utf8Text(click.ParamType):
    """Text in UTF-8, whatever the locale says: with `LC_ALL=C`, Python takes the bytes of an argument for broken ASCII."""

    name = "TEXT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return os.fsencode(str(value)).decode("utf-8")
        except UnicodeError:
            self.fail(f"{value!r} is not text in UTF-8", param, ctx)


class BiasPair(click.ParamType):
    """`ID=BIAS`."""

    name = "ID=BIAS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a bias; write it like 42=-100", param, ctx)


def option(*names: str, **settings: object):
    return click.option(*names, show_default=settings.pop("show_default", True), **settings)


@click.command(context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@option("--model", default="models/smollm2-135m", metavar="DIR", help="Model folder, or a shape with --load-format dummy.")
@option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto",
        help="dummy: random weights; MODEL may then be qwen2.5-0.5b to qwen2.5-72b.")
# Input
@option("--prompt", "prompts", type=Utf8Text(), multiple=True, show_default="none", help="A prompt; may be repeated.")
@option("--input", "input_path", metavar="FILE", show_default="none", help="JSONL rows to answer; - reads standard input.")
@option("--prompt-field", type=Utf8Text(), default="prompt", metavar="KEY", help="Key that holds the prompt in plain rows.")
@option("--system", type=Utf8Text(), show_default="none", help="System message for chats that have none.")
@option("--chat/--raw", "is_chat", default=None, show_default="--chat for --prompt if the model has a template, --raw for rows",
        help="Whether plain prompts go through the chat template. Rows with messages always do.")
@option("--limit", type=click.IntRange(1), metavar="N", show_default="all", help="Answer the first N rows only.")
@option("--dry-run", is_flag=True, help="Print each row's rendered prompt and token ids; load no weights.")
# Sampling
@option("--max-tokens", type=int, show_default=f"{DEFAULT_MAX_TOKENS}", help="Most tokens of an answer.")
@option("--min-tokens", type=int, show_default="0", help="No stop before this many tokens.")
@option("--temperature", type=float, show_default="model's, else 0", help="0 is greedy.")
@option("--top-p", type=float, show_default="model's, else 1", help="Keep the likeliest ids that hold this share; 0 keeps one.")
@option("--top-k", type=int, show_default="model's, else 0", help="Keep the K likeliest ids; 0 and -1 are off.")
@option("--min-p", type=float, show_default="model's, else 0", help="Drop ids less likely than this share of the likeliest.")
@option("--repetition-penalty", type=float, show_default="model's, else 1", help="Over prompt and answer, as transformers.")
@option("--presence-penalty", type=float, show_default="0", help="Over the answer only.")
@option("--frequency-penalty", type=float, show_default="0", help="Over the answer only.")
@option("--seed", type=int, show_default="random, stored", help="Each row's stream is keyed by this seed and its index.")
@option("--stop", type=Utf8Text(), multiple=True, show_default="none", help="Stop string; may be repeated.")
@option("--stop-token-id", "stop_token_ids", multiple=True, type=int, show_default="none", help="Stop id; may be repeated.")
@option("--ignore-eos", is_flag=True, help="Do not stop at the model's end tokens.")
@option("--include-stop-str", is_flag=True, help="Keep the matched stop string in the text.")
@option("--keep-special-tokens", is_flag=True, help="Keep special tokens in the text.")
@option("--n", type=int, show_default="1", help="Answers per row.")
@option("--logprobs", type=int, metavar="K", show_default="off", help="Log-probability of each token and K alternatives.")
@option("--prompt-logprobs", type=int, metavar="K", show_default="off", help="The same for the prompt's tokens.")
@option("--logit-bias", multiple=True, type=BiasPair(), show_default="none", help="Added to an id's logit; may be repeated.")
@option("--no-generation-config", is_flag=True, help="Ignore the model's generation_config.json.")
# Running
@option("--device", default="auto", metavar="NAME", help="auto (cuda if there is one), cpu or cuda.")
@option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16", "fp8"]), default="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU. fp8: matrices quantised at load, the rest as auto.")
@option("--tp", type=click.IntRange(1), metavar="N", show_default="torchrun's", help="Check the number of ranks.")
@option("--max-model-len", type=click.IntRange(2), metavar="N", show_default="model's", help="Most tokens of prompt and answer.")
@option("--kv-memory", type=ByteSize(), show_default="CPU: 25 % of free memory; GPU: 90 % less weights", help="KV cache a rank.")
@option("--max-batch", type=click.IntRange(1, 4096), default=32, metavar="N", help="Most rows computed at once.")
@option("--max-step-tokens", type=click.IntRange(1), metavar="N", show_default="CPU 512, GPU 4096",
        help="Most tokens a step: longer prompts are prefilled in chunks.")
@option("--no-prefix-reuse", is_flag=True, help="Compute shared prompt prefixes again.")
@option("--comm", type=click.Choice(["auto", *NAMES]), default="auto",
        help="All-reduce between the ranks. auto: on GPUs ipc, else nvshmem, nccl, gloo; on CPUs one_shot, else gloo.")
@option("--all-reduce", type=click.Choice(list(FORCED)), default="auto",
        help="For comparisons, the algorithm of our own all-reduce on GPUs (ipc, nvshmem). auto: by the size of a message.")
@option("--share-gpus", is_flag=True, help="Deal more ranks than GPUs to the GPUs there are; for tests, under MPS, without NCCL.")
@option("--shard-of", type=click.IntRange(1), metavar="N", show_default="off",
        help="Measure one rank of N in one process: rank 0's shard, no communication, meaningless answers.")
@option("--graphs/--eager", "graphs", default=True, show_default="--graphs",
        help="On a GPU: Doorbell's kernels, in CUDA graphs where they help, or plain torch steps, to try in doubt.")
@option("--threads", type=click.IntRange(1), metavar="N", show_default="cores / ranks", help="CPU threads a rank.")
# Speculation
@option("--ngram", "is_ngram", is_flag=True, help="Guess tokens from what the row has said before; the answers stay the same.")
@option("--draft-model", metavar="DIR", show_default="none",
        help="Guess tokens with a small model that has the same tokenizer (folder or shape, like --model).")
@option("--num-drafts", type=click.IntRange(1, MAX_NUM_DRAFTS), metavar="K",
        show_default=f"up to {MAX_ADAPTIVE_DRAFTS}, by how a row's guesses hold",
        help=f"Guessed tokens a row and step, 1 to {MAX_NUM_DRAFTS}.")
@option("--max-speculative-rows", type=click.IntRange(1), metavar="N", show_default=str(DEFAULT_SPECULATIVE_ROWS),
        help="In graphs, batches with more rows than this decode without guesses. Beyond the default 7B loses by a 0.5B draft.")
@option("--draft-placement", type=click.Choice(DRAFT_PLACEMENTS), default=DRAFT_PLACEMENTS[0], show_default=True,
        help="In graphs, the draft model whole on all ranks, on the first, which hands its guesses to the others, or split over "
             "all ranks like the target. Without graphs it is whole on the first, which sends its guesses with the step.")
@option("--draft-wait", type=click.Choice(DRAFT_WAITS), default=DRAFT_WAITS[0], show_default=True,
        help="With --draft-placement first, in graphs: the others wait for guesses in a kernel, or by a stream memory operation.")
@option("--draft-kv-memory", type=ByteSize(), show_default="a quarter of the target's",
        help="KV cache of the draft model on a CPU or with --eager; in graphs it has the target's pages.")
# Output
@option("--output", "output_path", metavar="FILE", show_default="standard output", help="JSONL rows, one as each finishes.")
@option("--openai", "is_openai", is_flag=True, help="Write rows in the OpenAI batch response shape.")
@option("--token-ids", "with_token_ids", is_flag=True, help="Add the answers' token ids to the rows.")
@option("--resume", is_flag=True, help="Continue OUTPUT: skip the rows it already holds.")
@option("--retry-failed", is_flag=True, help="With --resume: answer failed rows again.")
@option("--overwrite", is_flag=True, help="Replace OUTPUT.")
@option("--strict", is_flag=True, help="End the run at the first failed row.")
@option("--allow-failed-rows", is_flag=True, help="Exit with 0 even if some rows failed; they are in OUTPUT all the same.")
@option("--stream/--no-stream", "is_stream", default=None, show_default="on a terminal", help="Show a single answer as it grows.")
@option("--quiet", is_flag=True, help="No summary and no progress on standard error.")
@option("--profile", "profile_path", metavar="FILE", show_default="off",
        help="Time steps stage by stage: a table at the end, and rank 0's trace in FILE for ui.perfetto.dev.")
def command(**values: object) -> CommandOptions:
    """Answer prompts with a Qwen2.5, Llama or Qwen3 model on all ranks of this node.

    One --prompt prints its text. Several, or --input, write JSONL rows: {"prompt"}, {"messages"} or OpenAI batch rows in;
    one row out for every row in, with its id and index. A row's own options win over these flags, which win over the
    model's generation_config.json.
    """
    return CommandOptions(**values)


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point of every rank. Ends the process with a documented exit code."""
    sys.stderr = LastingStderr(sys.stderr)
    try:
        environment = Environment.read()
    except DoorbellError as error:
        leave(error.exit_code, Environment(), str(error))
    options = _read_options(argv, environment)
    note = SignalNote()
    note.on_signal = note.on_force = lambda code: _leave_early(code, environment)
    note.install()
    if environment.is_torchrun:
        end_with_parent()
    from engine.run import run_command

    end_process(run_command(options, environment, note))


def _read_options(argv: list[str] | None, environment: Environment) -> CommandOptions:
    is_speaker = environment.rank == 0
    try:
        with contextlib.nullcontext() if is_speaker else contextlib.redirect_stdout(io.StringIO()):
            options = command.main(args=argv, prog_name="python -m engine.generate", standalone_mode=False)
    except click.exceptions.Exit as request:
        leave(request.exit_code, environment)
    except click.ClickException as error:
        leave(2, environment, error.format_message() + " (see --help)")
    if not isinstance(options, CommandOptions):  # --help has been printed
        leave(0, environment)
    return options


def _leave_early(code: int, environment: Environment) -> NoReturn:
    """A signal while the libraries are still being imported: there is nothing to save and no peer to tell."""
    report(code, environment, describe_signal(code, environment, has_met=False))
    os._exit(code)


if __name__ == "__main__":
    main()
