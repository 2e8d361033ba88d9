"""The messages of a chat row: checked and brought to `{"role", "content"}` with string contents."""

from __future__ import annotations

from engine.refused import Refused, show

# `developer` is OpenAI's newer word for `system`. Chat templates do not know it and would leave the message out.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NOTHING = (None, "", [], {})
_UNSUPPORTED_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio", "images", "refusal")

Message = dict[str, str]


def parse_messages(value: object, system: str | None = None) -> list[Message]:
    """`value` as a non-empty list of messages, `system` put before it when it has no system message of its own.

    Content may be a string or a list of `{"type": "text", "text"}` parts, which are joined without a separator.

    *Raises*: Refused("invalid_messages") naming the message by its position from 0.
    """
    if not isinstance(value, list) or not value:
        raise Refused("invalid_messages", f"messages must be a non-empty list, not {show(value)}")
    messages = [_parse_message(position, message) for position, message in enumerate(value)]
    if system is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _parse_message(position: int, message: object) -> Message:
    place = f"messages[{position}]"
    if not isinstance(message, dict):
        raise Refused("invalid_messages", f"{place} must be an object with role and content, not {show(message)}")
    for key in ("role", "content"):
        if key not in message:
            found = ", ".join(show(key, 30) for key in list(message)[:8]) or "nothing"
            raise Refused("invalid_messages", f"{place} has no '{key}'; found: {found}")
    for key in _UNSUPPORTED_KEYS:
        if message.get(key) not in _NOTHING:
            raise Refused("invalid_messages", f"{place} has '{key}', which is not supported")
    role = message["role"]
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise Refused("invalid_messages", f"{place} has the role {show(role)}; possible are {known}")
    return {"role": _ROLES[role], "content": _content(place, message["content"])}


def _content(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise Refused(
            "invalid_messages", f"{place}: content must be a string or a list of text parts, not {show(content)}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if kind != "text":
            what = f"a part of type {show(kind)}" if kind is not None else show(part)
            raise Refused("invalid_messages", f"{place}: content holds {what}; only text parts are supported")
        if not isinstance(text, str):
            raise Refused("invalid_messages", f"{place}: a text part needs a string under 'text', not {show(text)}")
        texts.append(text)
    return "".join(texts)
