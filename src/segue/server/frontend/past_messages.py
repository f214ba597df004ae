"""Past messages: from the forms that clients send to the form that the model's chat template takes.

`checked` reads the messages of all three APIs. `TemplateForm` says how one chat template takes them. It is
found once for each template, by rendering short conversations, and not by the model's name.

| templates differ in | found by | what they get |
|---|---|---|
| arguments of calls | the form that is shown, and not in Python's form | an object or JSON text |
| ids of calls | a long id is refused | nine letters and digits, the same for a call and its result |
| the content of a message with calls | the calls are shown | an empty text or none |
| calls beside a text | the text is not shown | a message for the text, where the template takes it |
| calls in one message | two are refused | one message for each call |
| calls, results of tools | they are not shown | text of the assistant, text of the user |
| system messages | a later one, or any, is not shown | joined to the first, or text of the user |
| texts | a part is shown, a text is not | a part or a text, with a line break between several |

A template may refuse the order of a conversation. Then neighbours of one role are joined, then later system
messages moved; the prompt is made of the first version that the template takes (`TemplateForm.prompt`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from segue.server.frontend.problems import BadParam

Json = dict[str, Any]
#: Renders messages for a template. Raises BadParam if it refuses them.
Render = Callable[[list[Json]], str]

MAX_MESSAGES: Final = 10_000

_TEXT_KINDS: Final = frozenset(
    {"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"}
)
#: Kinds of parts that this model cannot read: the words in their names.
_MEDIA: Final = ("audio", "document", "file", "image", "screenshot", "video")
#: Parts of past messages that are also sent in another form, or are no text of the conversation.
_DROPPED: Final = frozenset(
    {"function_call", "reasoning", "redacted_thinking", "thinking", "tool_call", "tool_use"}
)
#: Roles of instructions.
_SYSTEM: Final = frozenset({"developer", "system"})
#: Fields of a message that `PastMessage` has in another form.
_READ: Final = frozenset({"role", "content", "tool_calls", "function_call", "tool_call_id", "reasoning"})
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call of a past message. `text` are its arguments as the model wrote them; `arguments` is an object in
    any case: arguments that are none stand in it under `arguments`."""

    id: str
    name: str
    arguments: Json
    text: str


@dataclass(frozen=True, slots=True)
class PastMessage:
    """One message. `answers` is the id of the call whose result it is; `more` are its other fields."""

    role: str
    texts: tuple[str, ...]
    calls: tuple[PastCall, ...] = ()
    answers: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All its texts, a line break between two."""
        return _lines(self.texts)


def _lines(texts: Sequence[str]) -> str:
    return "\n".join(text for text in texts if text)


# ---- what clients send --------------------------------------------------------------------------


def checked(messages: list[Json]) -> list[PastMessage]:
    """The messages of a chat. Raises BadParam with the place named."""
    if not messages:
        raise BadParam("messages: there must be at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise BadParam(f"messages: at most {MAX_MESSAGES}, not {len(messages)}", "messages")
    #: names by id of the calls that have no result yet
    waiting: dict[str, str] = {}
    return [_message(message, i, waiting) for i, message in enumerate(messages)]


def _message(message: Json, index: int, waiting: dict[str, str]) -> PastMessage:
    where, role = f"messages[{index}]", message.get("role")
    if not isinstance(role, str) or not role:
        raise BadParam(f"{where}.role: a role is needed, such as 'user'", f"{where}.role")
    if role == "function":  # OpenAI's older name
        role = "tool"
    calls = _calls(message, index)
    content = message.get("content")
    if content is not None:
        texts = texts_of(content, f"{where}.content", past=role in ("assistant", "tool"))
    elif calls or role in ("assistant", "tool"):
        texts = []
    else:
        raise BadParam(f"{where}.content: text is needed", f"{where}.content")
    # Templates ask whether a key is there.
    more = {name: value for name, value in message.items() if value is not None and name not in _READ}
    if isinstance(reasoning := message.get("reasoning"), str):  # vLLM's name for it
        more.setdefault("reasoning_content", reasoning)
    waiting.update((call.id, call.name) for call in calls)
    answers = ""
    if role == "tool":
        answers = _id(message.get("tool_call_id")) or next(iter(waiting), f"call_{index}")
        if name := waiting.pop(answers, None):
            more.setdefault("name", name)
    return PastMessage(role, tuple(texts), calls, answers, more)


def texts_of(content: Any, where: str, *, past: bool = False) -> list[str]:
    """The texts of a content. In `past` output of models and tools, parts of unknown kinds are shown as JSON.

    Raises BadParam for what is no text, with its kind.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadParam(f"{where}: text or a list of parts, not {_kind(content)}", where)
    return [text_of(part, f"{where}[{i}]", past=past) for i, part in enumerate(content)]


def text_of(part: Any, where: str, *, past: bool = False) -> str:
    """The text of one part; see `texts_of`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_KINDS:
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise BadParam(f"{where}.text: text is needed", f"{where}.text")
        return text
    if not past or not isinstance(part, dict) or any(medium in str(kind) for medium in _MEDIA):
        raise BadParam(f"{where}: this model reads text, not {kind or _kind(part)!r}", where)
    return "" if kind in _DROPPED else _shown(part)


def _shown(part: Json) -> str:
    """A part as JSON, without what only its own server can read."""

    def readable(found: Json) -> Json:
        return {k: v for k, v in found.items() if k not in ("cache_control", "data") and "encrypted" not in k}

    return json.dumps(json.loads(json.dumps(part), object_hook=readable), ensure_ascii=False)


def _calls(message: Json, index: int) -> tuple[PastCall, ...]:
    where, calls = f"messages[{index}].tool_calls", message.get("tool_calls")
    if not calls and isinstance(call := message.get("function_call"), dict):
        calls = [{"function": call}]
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise BadParam(f"{where}: a list of calls is needed", where)
    return tuple(_call(call, f"{where}[{i}]", f"call_{index}_{i}") for i, call in enumerate(calls))


def _call(call: Any, where: str, otherwise: str) -> PastCall:
    given = call if isinstance(call, dict) else {}
    function, arguments = given.get("function"), None
    if isinstance(function, dict):
        arguments = function.get("arguments")
    elif isinstance(function := given.get("custom"), dict):
        arguments = {"input": function.get("input")}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadParam(f"{where}.function.name: a name is needed", f"{where}.function")
    return PastCall(_id(given.get("id")) or otherwise, name, *_arguments(arguments))


def _id(given: Any) -> str:
    return str(given) if isinstance(given, str | int) else ""


def _arguments(given: Any) -> tuple[Json, str]:
    """See `PastCall`."""
    value = given
    with contextlib.suppress(ValueError, RecursionError):
        for _ in range(2):  # some clients encode twice
            if isinstance(value, str):
                value = json.loads(value) if value.strip() else None
    if value is None:
        value = {}
    if isinstance(given, str) and given.lstrip().startswith("{"):
        text = given
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, dict) else {"arguments": value}, text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else "null")


# ---- what a template takes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """The form in which one chat template takes messages."""

    #: it knows the role `developer`
    developer: bool = True
    #: roles whose content it reads as parts alone
    parts: Collection[str] = ()
    #: roles of which it shows nothing
    lost: Collection[str] = ()
    #: it shows several system messages, in any place
    later_system: bool = True
    #: it shows calls; else they are a part of the text
    calls: bool = True
    #: it shows calls where the content is none
    none_content: bool = False
    #: it shows no text beside calls
    text_apart: bool = False
    #: it takes one call in a message
    single_call: bool = False
    #: it takes arguments as JSON text
    text_arguments: bool = False
    #: it refuses ids of calls that are not nine letters and digits
    short_ids: bool = False
    #: it shows tools
    tools: bool = True

    @classmethod
    def of(cls, source: str, render: Render, *, tools: bool) -> TemplateForm:
        """The form of the template with this source. With `tools`, `render` gives it `PROBE_TOOL`."""
        probe = _Renderings(render)
        return replace(
            probe.calls(),
            developer="developer" in source,
            parts=probe.parts,
            lost=probe.lost,
            later_system=probe.later_system(),
            tools=not tools or probe.tools(),
        )

    def prompt(self, messages: Sequence[PastMessage], render: Render) -> tuple[str, str]:
        """The text that the template makes of the conversation, and the text of its last message. Raises
        BadParam if the template refuses it as it is and in every other order."""
        refused: BadParam | None = None
        tried: list[PastMessage] | None = None
        for version in self.versions(messages):
            if version == tried:
                continue
            tried = version
            try:
                return render(self.shaped(version)), version[-1].text
            except BadParam as error:
                refused = refused or error
        assert refused is not None, "there is at least one version"
        raise refused

    def versions(self, messages: Sequence[PastMessage]) -> Iterator[list[PastMessage]]:
        """The conversation as the template takes it, then with less and less of its order."""
        found = list(messages)
        if not self.developer:
            found = [replace(m, role="system") if m.role == "developer" else m for m in found]
        lost = set(self.lost) | (_SYSTEM if "system" in self.lost else set())
        found = _as_user(found, lost)
        if not self.later_system:
            found = _system_first(found)
        if self.single_call:
            found = _single_calls(found)
        yield found
        yield _joined(found)
        yield _joined(_system_first(found))
        yield _joined(_as_user(found, _SYSTEM))

    def shaped(self, messages: Sequence[PastMessage]) -> list[Json]:
        """The messages as the template takes them."""
        return [shaped for message in messages for shaped in self._shaped(message)]

    def _shaped(self, message: PastMessage) -> Iterator[Json]:
        head: Json = {"role": message.role, **message.more}
        if message.answers:
            head["tool_call_id"] = self._id(message.answers)
        if message.calls and not self.calls:
            shown = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            texts = *message.texts, json.dumps(shown, ensure_ascii=False)
            yield {**head, "content": self._content(message.role, texts)}
            return
        content = self._content(message.role, message.texts)
        if not message.calls:
            yield {**head, "content": content}
            return
        if content and (self.none_content or self.text_apart):
            yield {**head, "content": content}
            content = ""
        calls = [
            {
                "id": self._id(call.id),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.text if self.text_arguments else call.arguments,
                },
            }
            for call in message.calls
        ]
        yield {**head, "content": None if self.none_content else content, "tool_calls": calls}

    def _content(self, role: str, texts: Sequence[str]) -> str | list[Json]:
        # One part: some templates read the first one alone.
        text = _lines(texts)
        return [_part(text)] if role in self.parts else text

    def _id(self, given: str) -> str:
        if not self.short_ids or _SHORT_ID.fullmatch(given):
            return given
        digest = hashlib.blake2b(given.encode(errors="surrogatepass"), digest_size=6).digest()
        return base64.b32encode(digest).decode()[:9]


def _part(text: str) -> Json:
    return {"type": "text", "text": text}


def _as_user(messages: list[PastMessage], roles: Collection[str]) -> list[PastMessage]:
    return [PastMessage("user", m.texts) if m.role in roles else m for m in messages]


def _system_first(messages: list[PastMessage]) -> list[PastMessage]:
    system = [m for m in messages if m.role in _SYSTEM]
    if not system:
        return messages
    text = "\n\n".join(m.text for m in system)
    return [replace(system[0], texts=(text,)), *(m for m in messages if m.role not in _SYSTEM)]


def _joined(messages: list[PastMessage]) -> list[PastMessage]:
    """Neighbours of one role as one message."""
    out: list[PastMessage] = []
    for message in messages:
        if out and message.role == out[-1].role and message.role in ("assistant", "user"):
            last = out.pop()
            text = "\n\n".join(text for text in (last.text, message.text) if text)
            more = {**last.more, **message.more}
            message = replace(message, texts=(text,), calls=last.calls + message.calls, more=more)
        out.append(message)
    return out


def _single_calls(messages: list[PastMessage]) -> list[PastMessage]:
    """Several calls of a message as several messages, each before its result."""
    out: list[PastMessage] = []
    rest = iter(messages)
    message = next(rest, None)
    while message is not None:
        following = next(rest, None)
        if len(message.calls) > 1:
            results: list[PastMessage] = []
            while following is not None and following.role == "tool":
                results.append(following)
                following = next(rest, None)
            for i, call in enumerate(message.calls):
                out.append(replace(message, texts=message.texts if i == 0 else (), calls=(call,)))
                out += [result for result in results if result.answers == call.id]
            known = {call.id for call in message.calls}
            out += [result for result in results if result.answers not in known]
        else:
            out.append(message)
        message = following
    return out


# ---- how that is found --------------------------------------------------------------------------

_MARK, _TEXT, _NAME, _KEY, _VALUE, _TOOL = (
    f"segue{word}" for word in ("mark", "text", "call", "key", "value", "tool")
)
_LONG_IDS: Final = ("call_0123456789abcdef01234567", "call_76543210fedcba9876543210")
#: The tool of the renderings that find a template's form.
PROBE_TOOL: Final[Json] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "A text."}},
            "required": [_KEY],
        },
    },
}


class _Renderings:
    """Finds the form of one template: `parts` and `lost` at once, the rest on demand."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.parts: set[str] = set()
        self.lost: set[str] = set()
        for role in ("user", "assistant", "system"):
            before = [self.said("user")] if role == "assistant" else []
            after = [] if role == "user" else [self.said("user")]
            if self.shows(_MARK, *before, self.said(role, _MARK), *after):
                continue
            self.parts.add(role)
            if not self.shows(_MARK, *before, self.said(role, _MARK), *after):
                self.parts.discard(role)
                self.lost.add(role)
        self.lost -= {"user", "assistant"}  # they have no other form

    def said(self, role: str, text: str = "Hello.") -> Json:
        """A message in the form of its role."""
        return {"role": role, "content": [_part(text)] if role in self.parts else text}

    def rendered(self, *messages: Json) -> str | None:
        """None if the template refuses them."""
        try:
            return self._render(list(messages))
        except BadParam:
            return None

    def shows(self, text: str, *messages: Json) -> bool:
        """Whether a text of the messages is in what the template makes of them."""
        return text in (self.rendered(*messages) or "")

    def later_system(self) -> bool:
        """Whether the template shows a system message after others, and still the first one."""
        first, later = self.said("system", _MARK), self.said("system", _TEXT)
        text = self.rendered(first, self.said("user"), self.said("assistant"), later, self.said("user")) or ""
        return _MARK in text and _TEXT in text

    def tools(self) -> bool:
        """Whether the template shows `PROBE_TOOL`. A template that refuses it reads it."""
        found = self.rendered(self.said("user"))
        return found is None or _TOOL in found or self.shows(_TOOL, self.said("system"), self.said("user"))

    def calls(self) -> TemplateForm:
        """The form of calls and of their results: that with which most of them appears."""
        best, shown, flags = TemplateForm(), (False, False, False), (False, True)
        for role, parts, none_content, text_arguments, short_ids in itertools.product(
            ("tool", "user"), flags, flags, flags, flags
        ):
            form = TemplateForm(
                parts=(role,) if parts else (),
                lost=() if role == "tool" else ("tool",),
                none_content=none_content,
                text_arguments=text_arguments,
                short_ids=short_ids,
            )
            text = self._turn(form, 1) or ""
            found = _MARK in text, _NAME in text, _readable(text)
            if found > shown:
                best, shown = form, found
            if all(found):
                break
        self.parts.update(best.parts)
        self.lost.update(best.lost if shown[0] else ("tool",))
        if not shown[1]:
            return replace(best, calls=False)
        apart = replace(best, text_apart=True)
        if _TEXT not in (self._turn(best, 1, _TEXT) or "") and _TEXT in (self._turn(apart, 1, _TEXT) or ""):
            best = apart
        return replace(best, single_call=self._turn(best, 2) is None)

    def _turn(self, form: TemplateForm, calls: int, text: str = "") -> str | None:
        """Render so many calls, a text before them and their results in this form. After a text, an answer
        follows: roles may have to alternate."""
        made = [PastCall(i, _NAME, {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}') for i in _LONG_IDS[:calls]]
        results = [PastMessage("tool", (_MARK,), answers=call.id) for call in made]
        version = next(form.versions([PastMessage("assistant", (text,), tuple(made)), *results]))
        after = [self.said("assistant"), self.said("user")] if text else []
        return self.rendered(self.said("user"), *form.shaped(version), *after)


def _readable(text: str) -> bool:
    """Whether the arguments of the call are there, and neither in Python's form nor as JSON within JSON."""
    return _KEY in text and _VALUE in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text
