"""Records of other tools: ShareGPT and Alpaca, as the records that this package trains on.

{"conversations": [{"from", "value"}, ...], "system"?}                     ShareGPT
{"instruction", "output", "input"?, "system"?, "history"?: [[ask, answer], ...]}    Alpaca
"""

from __future__ import annotations

from typing import Any

from ligermodels.errors import DataError, short_repr

ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
}
# The prompt that Stanford Alpaca was trained with, for a model without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_CONTEXT = ", paired with an input that provides further context"


def normalised(record: dict[str, Any], where: str, *, has_template: bool) -> dict[str, Any]:
    """Return a ShareGPT or Alpaca record with `messages`, or `prompt` and `completion`.

    Other records are returned as they are.

    Args: where: the record's place for messages; has_template: whether the tokenizer has a chat
        template. Without one, an Alpaca record has the prompt that Alpaca was trained with.
    Raises:
        DataError: a part is missing, or has the wrong type.
    """
    if "conversations" in record and "messages" not in record:
        return {"messages": _with_system(record, where) + _sharegpt(record, where)}
    if "instruction" in record and "output" in record:
        return _alpaca(record, where, has_template)
    return record


def _sharegpt(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f'{where}: "conversations" must be a list of objects')
    messages = []
    for turn in turns:
        # Some data sets have ShareGPT's list and the keys of OpenAI's messages.
        sender, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(sender, str) or sender not in ROLES:
            raise DataError(
                f'{where}: "from": {short_repr(sender)} is not known; expected one of '
                + ", ".join(ROLES)
            )
        messages.append({"role": ROLES[sender], "content": value})
    return messages


def _alpaca(record: dict[str, Any], where: str, has_template: bool) -> dict[str, Any]:
    instruction, given = record["instruction"], record.get("input") or ""
    if not isinstance(instruction, str) or not isinstance(given, str):
        raise DataError(f'{where}: "instruction" and "input" must be strings')
    if has_template:
        asked = f"{instruction}\n\n{given}" if given else instruction
        pairs = [*_history(record, where), (asked, record["output"])]
        messages = _with_system(record, where)
        for ask, answer in pairs:
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages}
    if odd := next((key for key in ("system", "history") if record.get(key)), None):
        raise DataError(f'{where}: "{odd}" needs a chat template, and this model has none')
    prompt = _ALPACA.format(
        context=_CONTEXT if given else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": record["output"]}


def _history(record: dict[str, Any], where: str) -> list[Any]:
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise DataError(f'{where}: "history" must be a list of pairs, [question, answer]')
    return history


def _with_system(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise DataError(f'{where}: "system" must be a string')
    return [{"role": "system", "content": system}] if system else []
