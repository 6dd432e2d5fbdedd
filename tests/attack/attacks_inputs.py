"""Attacks by inputs of models: ids, labels, positions, masks, prompts, options and odd weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import ligermodels
from tests.attack.harness import Case, Fault, attack
from tests.training.tiny_run import tiny_config

VOCAB = 258
REFUSALS = (ValueError, IndexError, ligermodels.LigerError)


def make_model(**changes: Any) -> ligermodels.LigerLlama:
    torch.manual_seed(0)
    return ligermodels.LigerLlama(tiny_config(**changes)).eval()


def draw_ids(case: Case, batch: int = 2, seq: int = 6) -> Tensor:
    return torch.tensor([[case.draw.randrange(VOCAB) for _ in range(seq)] for _ in range(batch)])


def refused(what: str, error: BaseException | None, *words: str) -> None:
    """Require one of our refusals, with all words in its message."""
    if error is None:
        raise Fault(f"{what}: there was no error")
    if not isinstance(error, REFUSALS):
        raise Fault(f"{what}: {type(error).__name__}: {error}")
    for word in words:
        if word not in str(error):
            raise Fault(f"{what}: {word!r} is not in the message: {error}")


@attack("A", 9, weight=2)
def there_is_no_token_without_logits(case: Case) -> None:
    """Logits that are NaN or infinite end the generation; they never become a token."""
    model = make_model()
    name = case.draw.choice([name for name, _ in model.named_parameters()])
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        value = case.draw.choice([float("nan"), float("inf"), -float("inf"), 3e38])
        weight[case.draw.randrange(len(weight)) :][: case.draw.choice([1, 1, 64])] = value
    prompts = draw_ids(case, batch=case.draw.randint(1, 3))
    with torch.no_grad():
        logits = model.head.logits(model(prompts)[:, -1:])[:, -1]
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": {"do_sample": True},
        "top-k": {"do_sample": True, "top_k": 5, "top_p": 0.9},
    }
    options = dict(ways[case.turn(list(ways))])
    options |= case.draw.choice([{}, {"eos_token_id": []}, {"repetition_penalty": 1.5}])
    error, found = None, None
    try:
        found = model.generate(prompts, max_new_tokens=4, **options)
    except BaseException as caught:
        error = caught
    if not logits.amax(-1).isfinite().all():
        refused(f"{name} holds {value}", error, "NaN or infinite")
        if not isinstance(error, ligermodels.LigerError):
            raise Fault(f"the error is a {type(error).__name__}")
    elif error is not None:
        refused(f"{name} holds {value}", error, "NaN or infinite")
    elif not options:
        assert found is not None
        if not torch.equal(found[:, prompts.shape[1]], logits.argmax(-1)):
            raise Fault("the first token is not the likeliest")


@attack("B", 15)
def ids_are_in_the_vocabulary(case: Case) -> None:
    """An id outside the vocabulary is named, wherever it stands."""
    model, ids = make_model(), draw_ids(case)
    wrong = case.draw.choice([-1, VOCAB, VOCAB + 1, -(2**31), 2**31, 2**62, -100, -VOCAB])
    ids[case.draw.randrange(2), case.draw.randrange(6)] = wrong
    kind = case.turn(["forward", "labels", "generate", "cache"])
    error = None
    try:
        if kind == "forward":
            model(ids)
        elif kind == "labels":
            model(ids, labels=draw_ids(case))
        elif kind == "generate":
            model.generate(ids, max_new_tokens=2)
        else:
            model(ids, cache=ligermodels.KVCache(model.config, 2, 6))
    except BaseException as caught:
        error = caught
    refused(f"{wrong} in {kind}", error, "input_ids", str(wrong), "vocabulary")


NO_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float32, torch.float16]


@attack("B", 15, weight=2)
def dtypes_are_not_misread(case: Case) -> None:
    """Ids, labels, positions and masks of a wrong dtype are refused by name."""
    model, ids = make_model(), draw_ids(case)
    name = ("labels", "position_ids", "attention_mask", "input_ids")[case.seed % 4]
    odd = [torch.uint8, torch.bool] * (case.draw.random() < 0.5) or NO_INTEGERS
    dtype = case.draw.choice([*odd, torch.complex64])
    if name == "attention_mask":
        dtype = case.draw.choice([torch.float32, torch.bfloat16, torch.complex64])
    case.label(f"{name} of {dtype}".replace("torch.", ""))
    given: Any = torch.arange(12).view(2, 6).to(dtype)
    if name == "attention_mask":  # a mask to be added to the scores, which means the reverse
        given = torch.zeros(2, 6, dtype=dtype)
        given[:, :2] = torch.finfo(torch.bfloat16).min
    form = case.draw.random()
    if form < 0.1:
        given = given.real.long().tolist() if dtype.is_complex else given.tolist()
    elif form < 0.2 and name in ("labels", "input_ids"):
        given = torch.arange(12).view(2, 6).to_sparse()
        if name == "labels":
            return
    error = None
    try:
        if name == "input_ids":
            model(given)
        else:
            model(ids, **{name: given})
    except BaseException as caught:
        error = caught
    if form < 0.1 and name in ("position_ids", "attention_mask"):
        return  # Python itself names the type of an argument that is no tensor.
    refused(f"{name} of {dtype}", error, name)


@attack("B", 15)
def weights_that_no_file_can_hold_are_named(case: Case) -> None:
    """A weight with a special layout or dtype is named, and the folder does not change."""
    model = make_model(tie_word_embeddings=False)
    places = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    place = case.draw.choice(places)
    linear = model.get_submodule(place)
    weight = linear.weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = {
            "sparse": lambda: weight.to_sparse(),
            "sparse csr": lambda: weight.to_sparse_csr(),
            "sparse csc": lambda: weight.to_sparse_csc(),
            "sparse bsr": lambda: weight.to_sparse_bsr((1, 1)),
            "mkldnn": lambda: weight.to_mkldnn(),
            "complex": lambda: weight.to(torch.complex64),
            "int8": lambda: weight.to(torch.int8),
            "meta": lambda: weight.to("meta"),
        }
        changed = ways[case.turn(list(ways))]()
        linear.weight = nn.Parameter(changed, requires_grad=False)
        target = case.folder / "out"
        make_model().save_hf(target)
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        error = None
        try:
            model.save_hf(target)
        except BaseException as caught:
            error = caught
    layer = ".".join(place.split(".")[:3]) if place.startswith("layers") else "head"
    refused(f"{place} of {changed.layout}", error, layer)
    if not isinstance(error, ligermodels.SaveError):
        raise Fault(f"{place}: {type(error).__name__}: {error}")
    if {path.name: path.read_bytes() for path in target.iterdir()} != before:
        raise Fault("the refused save changed the folder")


# Prompts and options of generate that mean nothing.
PROMPTS: list[Any] = [
    *([[2**70]], [["a"]], [None], [[1, None]], [[1.5]], [1.5], "hi", b"hi", 5, None, {1: 2}, {3}),
    *([[True]], [[-1]], [[VOCAB]], [[]], [], [[[1]]], [1, [2]], [[1], "a"], object(), [[1], None]),
    *(torch.zeros(0), torch.tensor(5), torch.ones(2, 3).to_sparse(), torch.ones(1, 1, 1).long()),
    *(torch.ones(2, 3, dtype=torch.complex64), torch.ones(2, 3), torch.tensor([[2**40]])),
]
OPTIONS: list[tuple[str, Any]] = [
    *(("max_new_tokens", x) for x in (0, -1, 10**12, 10**18, 10**30, 2.5, "3", None, float("nan"))),
    *(("temperature", x) for x in (0.0, -1.0, float("nan"), float("inf"), "a", None)),
    *(("top_k", x) for x in (0, -1, 2.5, "x")),
    *(("top_p", x) for x in (0.0, 1.5, float("nan"), "x")),
    *(("eos_token_id", x) for x in (2**70, [2**70], 1.5, "a", ["a"])),
    *(("pad_token_id", x) for x in (2**70, "a", VOCAB, -1)),
    *(("repetition_penalty", x) for x in (0.0, -1.0, float("nan"), "x")),
    ("attention_mask", torch.tensor([1.0, -1e9])),
]
# These do mean something.
USABLE: list[dict[str, Any]] = [
    *({"temperature": x} for x in (1e-40, 1e-310, 5e-324, 1e-20, 1e-8, 1e40, 1e308)),
    *({"top_k": 10**30}, {"top_p": 1e-320}, {"eos_token_id": -5}, {"max_new_tokens": 1}),
]


@attack("B", 14, weight=2)
def numbers_without_meaning_are_named(case: Case) -> None:
    """Prompts and options without a meaning are refused by name; extreme ones work."""
    model = make_model()
    prompt: Any = [1, 2]
    options: dict[str, Any] = {"max_new_tokens": 2}
    kind = case.turn(["prompt", "option", "usable"])
    if kind == "prompt":
        prompt = case.draw.choice(PROMPTS)
        name = "input_ids"
    elif kind == "option":
        name, value = case.draw.choice(OPTIONS)
        sampling = {"do_sample": True} if name in ("temperature", "top_k", "top_p") else {}
        options |= {name: value} | sampling
    else:
        options |= {"do_sample": True} | case.draw.choice(USABLE)
        name = str(options)
    error, found = None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = model.generate(prompt, **options)
        except BaseException as caught:
            error = caught
    if kind != "usable":
        refused(f"{prompt!r}, {options}", error, name)
    elif found is None:
        raise Fault(f"{options}: {type(error).__name__}: {error}")
    elif options.get("temperature", 1) < 1e-6:
        greedy = model.generate(prompt, max_new_tokens=2)
        if not torch.equal(found, greedy):
            raise Fault(f"{options}: a draw at this temperature is not the likeliest token")
