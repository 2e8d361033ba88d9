"""What the object of a line asks for: the shapes of rows, each read into one `Request`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import Message, parse_messages
from engine.option_names import ALIASES, OPTIONS, mistyped_option, refuse_unsupported
from engine.options import parse_options
from engine.refused import Refused, show
from engine.sampling_params import SamplingParams

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_TOKEN_FIELDS = ("prompt_token_ids", "input_ids")
_INPUT_FIELDS = ("prompt", "messages", *_TOKEN_FIELDS)
_OPTION_OBJECTS = ("sampling_params", "params")
# Keys of an OpenAI body that are not sampling options. Those without a meaning here change no answer and are passed
# over.
_BODY_KEYS = ("model", *_INPUT_FIELDS, "continue_final_message", "stream")
_BODY_IGNORED = ("stream_options", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@dataclass
class Request:
    """A row without its place in the file."""

    params: SamplingParams
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    continue_final_message: bool = False
    system: str | None = None
    extra: dict[str, object] = field(default_factory=dict)
    model: str | None = None
    wants_stream: bool = False

    def fields(self) -> dict[str, object]:
        """The part that a `Row` has under the same names, less `params`."""
        names = ("prompt", "messages", "prompt_token_ids", "continue_final_message", "system", "extra")
        return {name: getattr(self, name) for name in names}


def read_openai(value: dict[str, object], defaults: SamplingParams, system: str | None) -> tuple[str, Request]:
    """An OpenAI batch row, its id already taken: endpoint and request.

    *Raises*: Refused for another method or endpoint, options outside the body, and all that the body gets wrong.
    """
    body = value["body"]
    if not isinstance(body, dict):
        raise Refused("invalid_row", f"body must be an object, not {show(body)}")
    extra = {key: item for key, item in value.items() if key not in ("body", "method", "url")}
    for key in extra:
        if key in OPTIONS or key in ALIASES:
            raise Refused("invalid_row", f"the option '{key}' of an OpenAI row belongs inside its body")
    _check_free_keys(extra)
    method = value.get("method")
    if method is not None and not (isinstance(method, str) and method.upper() == "POST"):
        raise Refused("invalid_row", f"method must be POST, not {show(method)}")
    endpoint = _endpoint(value.get("url"), body)
    request = _read_input(body, "prompt", defaults, system)
    if request.prompt_token_ids is None and (request.messages is not None) != (endpoint == CHAT):
        wanted = "messages" if endpoint == CHAT else "prompt"
        raise Refused("invalid_row", f"the body for {endpoint} needs '{wanted}'")
    request.model = _typed(body, "model", str)
    request.wants_stream = bool(_typed(body, "stream", bool))
    request.params = parse_options(body, defaults, allow=(*_BODY_KEYS, *_BODY_IGNORED))
    request.extra = extra
    return endpoint, request


def read_plain(value: dict[str, object], defaults: SamplingParams, system: str | None, prompt_field: str) -> Request:
    """A plain row, its id already taken: prompt, messages or ids and the options beside them.

    *Raises*: Refused, as `read_openai`.
    """
    row_system = _typed(value, "system", str)
    taken = {"continue_final_message", "system", prompt_field, *_OPTION_OBJECTS}
    if prompt_field in _INPUT_FIELDS or value.get(prompt_field) is None:
        taken |= {"prompt", "messages", *_TOKEN_FIELDS}
    request = _read_input(value, prompt_field, defaults, system if row_system is None else row_system)
    if row_system is not None and request.messages is not None and request.messages[0]["content"] != row_system:
        raise Refused("invalid_row", "the row has a 'system' text and a system message; give one of them")
    options = {key: item for key, item in value.items() if key not in taken and (key in OPTIONS or key in ALIASES)}
    params = defaults
    for name in _OPTION_OBJECTS:
        inner = _typed(value, name, dict) or {}
        for key in inner:
            if key in options and inner[key] != options[key]:
                raise Refused(
                    "invalid_option", f"the option '{key}' is given at the top level and in {name}, and differs"
                )
        params = parse_options(inner, params)
    request.params = parse_options(options, params)
    request.extra = {key: item for key, item in value.items() if key not in taken and key not in options}
    _check_free_keys(request.extra)
    return request


def _read_input(value: dict[str, object], prompt_field: str, defaults: SamplingParams, system: str | None) -> Request:
    """Prompt, messages or token ids of `value`: exactly one of them."""
    names = [name for name in _INPUT_FIELDS if value.get(name) is not None]
    if prompt_field not in _INPUT_FIELDS and value.get(prompt_field) is not None:
        names = [prompt_field]  # the user named this column: the others are data
    if len(names) != 1:
        raise Refused("invalid_row", _input_sentence(value, names, prompt_field))
    name, content = names[0], value[names[0]]
    request = Request(defaults)
    if name == "messages" or _looks_like_messages(content):
        request.messages = parse_messages(content, system)
    elif name in _TOKEN_FIELDS or (isinstance(content, list) and content and not isinstance(content[0], str)):
        request.prompt_token_ids = _token_ids(name, content)
    else:
        request.prompt, request.system = _prompt(name, content), system
    request.continue_final_message = bool(_typed(value, "continue_final_message", bool))
    if request.continue_final_message and (request.messages is None or request.messages[-1]["role"] != "assistant"):
        raise Refused("invalid_messages", "continue_final_message needs messages that end with one of the assistant")
    return request


def _input_sentence(value: dict[str, object], names: list[str], prompt_field: str) -> str:
    if names:
        return f"the row has {' and '.join(names)}; exactly one of them is possible"
    found = ", ".join(show(key, 30) for key in list(value)[:8]) or "nothing"
    for key in _OPTION_OBJECTS:
        inner = value.get(key)
        if isinstance(inner, dict) and any(name in inner for name in _INPUT_FIELDS):
            remedy = f"the request of an OpenAI batch row stands under 'body', not '{key}'"
            return f"unknown shape of row (found: {found}); {remedy}"
    wanted = " or ".join(dict.fromkeys((prompt_field, *_INPUT_FIELDS, "body")))
    return f"unknown shape of row: no {wanted}; found: {found}"


def _prompt(name: str, content: object) -> str:
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if isinstance(content, list):
        raise Refused("invalid_row", f"{name} is a list of {len(content)}; write one row for each prompt")
    if not isinstance(content, str):
        raise Refused("invalid_row", f"{name} must be a string, not {show(content)}")
    return content


def _token_ids(name: str, content: object) -> list[int]:
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        content = content[0]
    if not isinstance(content, list) or not content:
        raise Refused("invalid_row", f"{name} must be a non-empty list of token ids, not {show(content)}")
    if isinstance(content[0], list):
        raise Refused("invalid_row", f"{name} is a list of {len(content)}; write one row for each prompt")
    for position, token_id in enumerate(content):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise Refused(
                "invalid_token_id", f"{name}[{position}] must be a token id (0 or more), not {show(token_id)}"
            )
    return content


def _looks_like_messages(content: object) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)


def _endpoint(url: object, body: dict[str, object]) -> str:
    """The endpoint of `url`, whatever host or prefix it has; without one, what the body looks like."""
    if url is None:
        return CHAT if body.get("prompt") is None or body.get("messages") is not None else COMPLETIONS
    path = url.rstrip("/") if isinstance(url, str) else ""
    for endpoint in (CHAT, COMPLETIONS):
        if path.endswith(endpoint.removeprefix("/v1")):
            return endpoint
    raise Refused("invalid_row", f"url {show(url)} is not supported; possible are {CHAT} and {COMPLETIONS}")


def _check_free_keys(extra: dict[str, object]) -> None:
    """Unknown keys are data, carried to the output, unless they are an option we do not do or a typing slip of one."""
    for key, value in extra.items():
        if key in _INPUT_FIELDS or refuse_unsupported(key, value, in_body=False):
            continue
        option = mistyped_option(key)
        if option is not None:
            remedy = 'a data column of this name can stand inside "metadata"'
            raise Refused("unknown_option", f"unknown option '{key}' (did you mean '{option}'?); {remedy}")


def _typed(value: dict[str, object], name: str, kind: type) -> object:
    """`value[name]` of the given type, or None when it is null or not there."""
    item = value.get(name)
    if item is not None and not isinstance(item, kind):
        wanted = {str: "a string", bool: "true or false", dict: "an object"}[kind]
        raise Refused("invalid_row", f"{name} must be {wanted}, not {show(item)}")
    return item
