"""Compare the counts of two versions, for each fault that was found in the older one.

    python -m tests.attack A B C D E --runs 1000 --out new.json
    python -m tests.attack A B C D E --runs 1000 --out old.json --package FOLDER --limit 8
    python -m tests.attack.table --before 4595bb5=old.json --after COMMIT=new.json --out attacks

This writes attacks.json and attacks.md. Each file of counts comes with the commit that was
attacked; several are added up. The exit code is 1 if the older version passed an attack that should
find a fault in it, or if the newer one broke.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

GROUPS = {
    "A": "data lost, saves torn, results silently wrong",
    "B": "tracebacks where one line belongs",
    "C": "hangs",
    "D": "hubs that lie or break",
    "E": "messages and manners of the command line",
}


class Found(NamedTuple):
    """A fault of the older version, and the attack that finds it."""

    number: int
    fault: str
    attack: str
    label: str = "*"  # a pattern, of the labels under which the attack counts


FOUND = [
    Found(1, "threads that save to one folder: saves fail", "threads_save_to_one_folder",
          "each save succeeds"),
    Found(1, "threads that save to one folder: a save without an error is torn",
          "threads_save_to_one_folder", "a save without an error*"),
    Found(1, "processes that save to one folder: saves fail or tear it",
          "processes_save_to_one_folder", "the checkpoint"),
    Found(1, "processes that save to one folder: the user's other files are lost",
          "processes_save_to_one_folder", "the user's files"),
    Found(2, "a load during saves mixes one model's config with another's weights",
          "loads_while_others_save", "config and weights of several versions"),
    Found(2, "a load through a link that changes mixes versions", "loads_while_a_link_changes"),
    Found(2, "a save writes the tokenizer of another version",
          "a_save_writes_the_tokenizer_that_was_loaded"),
    Found(3, "no atomic exchange: a load between the two renames makes the save fail",
          "a_load_between_two_renames", "the save fails"),
    Found(4, "a volume mounted inside the target is emptied",
          "a_volume_inside_the_target_keeps_its_files"),
    Found(4, "convert removes a user's safetensors", "convert_keeps_a_users_files", "weights*"),
    Found(4, "convert removes a user's tokenizer files", "convert_keeps_a_users_files",
          "tokenizer*"),
    Found(4, "convert removes a user's vocabulary files", "convert_keeps_a_users_files",
          "vocabulary*"),
    Found(4, "finetune --overwrite deletes a model/ that no run made",
          "overwriting_removes_only_what_a_run_made", "model/ that no run made"),
    Found(4, "`.lock` is truncated through a link", "no_file_is_written_through_a_link", ".lock"),
    Found(4, "--revision ../../x writes outside the cache", "a_revision_stays_in_the_cache"),
    Found(4, "--output . scatters files", "a_run_is_not_scattered_among_other_files"),
    Found(5, "finetune exports what is not finite after its last update",
          "an_export_can_be_loaded", "update"),
    Found(5, "finetune exports what overflows float16", "an_export_can_be_loaded", "float16"),
    Found(5, "a perplexity of 300 digits", "a_perplexity_has_few_digits"),
    Found(5, "save_hf writes NaN", "nothing_that_is_not_finite_is_saved", "nan"),
    Found(5, "save_hf and convert write an overflow of the cast",
          "a_cast_that_overflows_is_not_saved"),
    Found(5, "save_hf drops tokenizer and generation files when the source is gone",
          "a_save_without_its_source_drops_nothing", "the folder is gone"),
    Found(6, "a resumed run does not notice another config", "a_replaced_model_is_noticed",
          "config"),
    Found(6, "a resumed run does not notice other weights", "a_replaced_model_is_noticed",
          "weights"),
    Found(6, "... nor flipped bits in its checkpoint", "a_damaged_checkpoint_of_a_run_is_noticed",
          "bits"),
    Found(6, "... nor other dtypes", "a_damaged_checkpoint_of_a_run_is_noticed", "dtype"),
    Found(6, "... nor an impossible step", "a_damaged_checkpoint_of_a_run_is_noticed", "step"),
    Found(6, "... nor the checkpoint of half a training that says it is the last",
          "a_damaged_checkpoint_of_a_run_is_noticed", "half as whole"),
    Found(6, "a checkpoint that is cut while it is mapped: SIGBUS",
          "a_checkpoint_that_is_cut_while_it_is_read"),
    Found(7, "a tokenizer file that is a dead link counts as absent",
          "tokenizer_files_that_are_no_files", "dead link"),
    Found(7, "... a folder", "tokenizer_files_that_are_no_files", "folder"),
    Found(7, "... a pipe", "tokenizer_files_that_are_no_files", "pipe"),
    Found(7, "a generation_config.json that is a dead link counts as absent",
          "an_odd_file_of_a_checkpoint_is_not_absent", "generation_config.json: dead link"),
    Found(7, "... a folder", "an_odd_file_of_a_checkpoint_is_not_absent",
          "generation_config.json: folder"),
    Found(7, "... a pipe", "an_odd_file_of_a_checkpoint_is_not_absent",
          "generation_config.json: pipe"),
    Found(7, "a file that is not in the offline cache counts as absent",
          "an_incomplete_cache_does_not_count_as_the_whole"),
    Found(7, "finetune trains without the end token",
          "settings_that_are_no_files_for_the_commands", "finetune*"),
    Found(8, "tokenizer.model: an added token ' x' with lstrip", "added_tokens_of_tokenizer_models",
          "a space, lstrip"),
    Found(8, "tokenizer.model: an added token of spaces", "added_tokens_of_tokenizer_models",
          "spaces"),
    Found(8, "tokenizer.model: an added token that is a newline",
          "added_tokens_of_tokenizer_models", "a newline"),
    Found(8, "BPE dropout stays on", "the_same_text_has_the_same_tokens"),
    Found(8, "duplicate keys", "contradictions_about_ids", "a key twice"),
    Found(8, '"0300" beside "300"', "contradictions_about_ids", "300 and 0300"),
    Found(8, "two tokens with one id", "contradictions_about_ids", "one id, two tokens*"),
    Found(9, "greedy generation from NaN logits returns token 0",
          "there_is_no_token_without_logits", "greedy"),
    Found(9, "generate reads generation_config.json at each call",
          "generation_settings_changed_after_the_load"),
    Found(10, "Ctrl-C saves nothing", "a_signal_saves_the_run", "SIGINT: what is saved"),
    Found(10, "SIGTERM saves nothing", "a_signal_saves_the_run", "SIGTERM: what is saved"),
    Found(10, "what Ctrl-C says about resuming is false", "a_signal_saves_the_run",
          "SIGINT: what is said"),
    Found(11, "a pad token beyond the embedding stops a run that has begun",
          "ids_beyond_the_embedding_are_found_in_time", "pad"),
    Found(11, "negative ids in added_tokens.json", "ids_that_are_no_ids",
          "negative in added_tokens.json"),
    Found(11, "ids beyond int32", "ids_that_are_no_ids", "beyond int32"),
    Found(12, "Rust panics: retry limit of a regex", "tokenizers_that_panic", "regex of a *"),
    Found(12, "Rust panics: odd normalizers", "tokenizers_that_panic", "table of characters"),
    Found(12, "Rust panics: odd templates", "tokenizers_that_panic", "template"),
    Found(12, "models without an unknown token", "tokenizers_that_panic", "no unknown token*"),
    Found(12, "wrong types in tokenizer_config.json", "odd_values_in_tokenizer_settings"),
    Found(12, "text that is not Unicode: prompts", "text_that_is_not_unicode", "prompt"),
    Found(12, "... system texts", "text_that_is_not_unicode", "system text"),
    Found(12, "... standard input", "text_that_is_not_unicode", "standard input"),
    Found(12, "... templates", "text_that_is_not_unicode", "template*"),
    Found(12, "... names", "text_that_is_not_unicode", "name"),
    Found(13, "metrics missing", "metrics_of_any_content", "missing"),
    Found(13, "metrics empty", "metrics_of_any_content", "empty"),
    Found(13, "metrics of wrong types", "metrics_of_any_content", "types"),
    Found(13, "metrics deeply nested", "metrics_of_any_content", "deep"),
    Found(13, "run.json with wrong types", "settings_of_any_content", "[aks]*"),
    Found(13, "optimizer states of wrong shapes", "optimizer_states_of_wrong_shapes", "[se]*"),
    Found(14, "a loop of links as target", "links_that_lead_nowhere_are_no_traceback",
          "a loop as target"),
    Found(14, "--seed 2**64", "numbers_of_the_command_line_are_checked", "--seed*"),
    Found(14, "--temperature 1e-40", "numbers_of_the_command_line_are_checked", "--temperature*"),
    Found(14, "--max-new-tokens 10**18", "numbers_of_the_command_line_are_checked",
          "--max-new-tokens*"),
    Found(14, "10**30 steps", "numbers_without_measure", "10[*][*]30 steps"),
    Found(14, "a batch of 10**12", "numbers_without_measure", "a batch of*"),
    Found(14, "Ctrl-C while starting: a traceback", "a_start_can_be_interrupted", "a traceback"),
    Found(14, "Ctrl-C while starting: swallowed", "a_start_can_be_interrupted",
          "it is swallowed"),
    Found(15, "input_ids out of range", "ids_are_in_the_vocabulary"),
    Found(15, "labels of uint8", "dtypes_are_not_misread", "labels of uint8"),
    Found(15, "position_ids of bool", "dtypes_are_not_misread", "position_ids of bool"),
    Found(15, "a sparse weight is saved", "weights_that_no_file_can_hold_are_named", "sparse*"),
    Found(16, "a pipe as template", "files_that_never_end", "*pipe as template"),
    Found(16, "an endless device as template", "files_that_never_end", "device as template"),
    Found(16, "endless templates", "templates_that_never_end"),
    Found(16, "templates that compute without end", "templates_that_compute_without_end"),
    Found(16, "templates whose text is huge", "templates_that_write_without_end"),
    Found(16, "templates whose source is huge", "templates_that_are_huge_or_deep"),
    Found(16, "a bomb as normalizer", "normalizers_that_are_bombs", "normalizer"),
    Found(17, "the hub's `sha` is a path, and a file is left there",
          "a_lie_is_found_out_and_leaves_no_trace", "call_a_path_the_commit"),
    Found(17, "the hub's `sha` is no commit", "a_lie_is_found_out_and_leaves_no_trace",
          "lie_about_the_commit"),
    Found(17, "content that contradicts the hub's sha256 loads",
          "a_lie_is_found_out_and_leaves_no_trace", "lie_about_bytes_of_weights"),
    Found(17, "a shard's name is a pattern: *.safetensors", "file_names_are_no_patterns",
          "[*].safetensors"),
    Found(17, "a shard's name is a pattern: model[1].safetensors", "file_names_are_no_patterns",
          "model[[]1].safetensors"),
    Found(17, "a blob that is cut in the cache is refused for ever", "a_damaged_cache_is_healed",
          "cut"),
    Found(17, "401 is called no connection", "a_broken_hub_is_told_from_a_missing_connection",
          "401"),
    Found(17, "5xx is called no connection", "a_broken_hub_is_told_from_a_missing_connection",
          "50?"),
    Found(18, '"no tokenizer.json ... found tokenizer.json": a pipe',
          "tokenizers_that_are_there_but_no_file", "pipe"),
    Found(18, "... a folder", "tokenizers_that_are_there_but_no_file", "folder"),
    Found(18, "... a dead link", "tokenizers_that_are_there_but_no_file", "dead link"),
    Found(18, "an empty reason for MemoryError", "running_out_of_memory_has_no_empty_reason"),
    Found(18, "a pipe as training data is called missing",
          "data_that_is_no_file_is_called_what_it_is", "pipe"),
    Found(18, "/dev/fd/N as training data is called missing",
          "data_that_is_no_file_is_called_what_it_is", "fd"),
    Found(18, "paths that are not UTF-8", "paths_need_not_be_unicode", "generate"),
    Found(18, "roles human and gpt", "messages_name_the_way_out", "human and gpt"),
    Found(18, "names of datasets on the hub", "messages_name_the_way_out", "hub"),
    Found(18, '"eval fraction" without its flag', "messages_name_the_way_out", "small"),
    Found(18, '"overwrite it" without its flag', "messages_name_the_way_out", "again"),
    Found(18, "convert M x.gguf makes a folder of that name", "convert_to_the_name_of_a_file"),
    Found(18, "no suggestion for --lr", "misspelt_words_are_suggested", "--lr"),
    Found(18, "no suggestion for fintune", "misspelt_words_are_suggested", "fintune"),
    Found(18, "no suggestion for --device gpu", "misspelt_words_are_suggested", "--device gpu"),
    Found(18, "--temperature 0 is refused", "temperature_0_is_greedy"),
    Found(18, "missing arguments come one at a time", "missing_arguments_are_named_at_once"),
    Found(18, "python -m ligermodels does not exist", "the_module_is_a_program"),
    Found(18, "a chat shows no way out", "a_chat_is_left_only_by_its_way_out",
          "it shows the way out"),
    Found(18, "a chat sends empty lines", "a_chat_is_left_only_by_its_way_out",
          "it sends no empty lines"),
    Found(18, "a chat ends at Ctrl-C within an answer", "a_chat_is_left_only_by_its_way_out",
          "Ctrl-C"),
]  # fmt: skip


class Tally(dict[str, Any]):
    """Counts of one version: attack -> its group, runs, faults, and those of each label.

    `counted` has, for each commit that was attacked, its runs and faults by group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[str, dict[str, list[int]]] = {}

    @classmethod
    def read(cls, files: Sequence[tuple[str, Path]]) -> Tally:
        """Add up files of counts, each of them with the commit that was attacked."""
        tally = cls()
        for commit, file in files:
            groups = tally.counted.setdefault(commit, {})
            for row in json.loads(file.read_text()):
                fresh = {"group": row["group"], "runs": 0, "faults": 0, "skipped": 0}
                found = tally.setdefault(row["attack"], {**fresh, "by_label": {}})
                for key in ("runs", "faults", "skipped"):
                    found[key] += row[key]
                _add(groups, row["group"], (row["runs"], row["faults"]))
                for label, count in row["by_label"].items():
                    _add(found["by_label"], label, count)
        return tally

    def of(self, fault: Found) -> list[int]:
        """Return the runs in which this fault was looked for, and in how many it was found."""
        found = self.get(fault.attack)
        if found is None:
            return [0, 0]
        if fault.label == "*":
            return [found["runs"], found["faults"]]
        matching = [n for label, n in found["by_label"].items() if fnmatchcase(label, fault.label)]
        return [sum(runs for runs, _ in matching), sum(faults for _, faults in matching)]

    def by_group(self) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for found in self.values():
            _add(groups, found["group"], (found["runs"], found["faults"]))
        return dict(sorted(groups.items()))


def _add(counts: dict[str, list[int]], name: str, more: Sequence[int]) -> None:
    """Add runs and faults to those of a name."""
    runs, faults = counts.get(name, (0, 0))
    counts[name] = [runs + more[0], faults + more[1]]


def compare(before: Tally, after: Tally) -> dict[str, Any]:
    """Return the counts of both versions by group and by fault, as [runs, faults]."""
    groups_before, groups_after = before.by_group(), after.by_group()
    return {
        "counted": {"before": before.counted, "after": after.counted},
        "groups": [
            {"group": g, "before": groups_before.get(g, [0, 0]), "after": groups_after[g]}
            for g in groups_after
        ],
        "faults": [
            {**fault._asdict(), "before": before.of(fault), "after": after.of(fault)}
            for fault in FOUND
        ],
        "skipped": {
            name: [before.get(name, {}).get("skipped", 0), found["skipped"]]
            for name, found in sorted(after.items())
            if found["skipped"]
        },
        "attacks": {
            name: {
                "group": found["group"],
                "before": [before[name]["runs"], before[name]["faults"]] if name in before else [],
                "after": [found["runs"], found["faults"]],
            }
            for name, found in sorted(after.items())
        },
    }


def markdown(found: dict[str, Any]) -> str:
    """Return both tables as a page."""
    lines = [
        "# Counts of the attacks, before and after",
        "",
        "Before is the version in which these faults were found; after are the mended versions, of",
        "which the second table has the commits. Each cell says in how many of the runs a promise",
        "was broken. `python -m tests.attack.table --help` says how to count again.",
        "",
        "| group | before | after |",
        "| --- | --- | --- |",
    ]
    for row in found["groups"]:
        what = GROUPS[row["group"]]
        lines.append(f"| {row['group']}: {what} | {_cell(row['before'])} | {_cell(row['after'])} |")
    lines += [
        "",
        "The commits whose runs are added up above:",
        "",
        f"| | commit | {' | '.join(GROUPS)} |",
        "| --- | --- |" + " --- |" * len(GROUPS),
    ]
    for when, commits in found["counted"].items():
        for commit, groups in commits.items():
            cells = [_cell(groups.get(group, [0, 0])) for group in GROUPS]
            lines.append(f"| {when} | {commit} | {' | '.join(cells)} |")
    lines += ["", "| | fault | attack | before | after |", "| --- | --- | --- | --- | --- |"]
    for row in found["faults"]:
        attack = f"`{row['attack']}`" + (f" ({row['label']})" if row["label"] != "*" else "")
        cells = [str(row["number"]), row["fault"], attack.replace("|", r"\|")]
        lines.append(f"| {' | '.join(cells)} | {_cell(row['before'])} | {_cell(row['after'])} |")
    if found["skipped"]:
        lines += [
            "",
            "Runs that the machine did not allow, and that count nowhere, before and after:",
        ]
        lines += [
            f"{name} {before} and {after};" for name, (before, after) in found["skipped"].items()
        ]
    return "\n".join(lines) + "\n"


def _cell(count: list[int]) -> str:
    runs, faults = count
    return f"{faults} of {runs}" if runs else "not run"


def _source(text: str) -> tuple[str, Path]:
    commit, equals, file = text.partition("=")
    if not (commit and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r} is not COMMIT=FILE")
    return commit, Path(file)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.table", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--before", type=_source, nargs="+", required=True, metavar="COMMIT=FILE")
    parser.add_argument("--after", type=_source, nargs="+", required=True, metavar="COMMIT=FILE")
    parser.add_argument("--out", type=Path, required=True, help="the files without their endings")
    options = parser.parse_args()
    found = compare(Tally.read(options.before), Tally.read(options.after))
    rows = [json.dumps(row) for row in found["faults"]]
    others = {key: value for key, value in found.items() if key != "faults"}
    text = json.dumps(others)[:-1] + ', "faults": [\n' + ",\n".join(rows) + "\n]}\n"
    options.out.with_suffix(".json").write_text(text)
    options.out.with_suffix(".md").write_text(markdown(found))
    for row in found["groups"]:
        print(f"{row['group']}: {_cell(row['before'])}, then {_cell(row['after'])}")
    silent = [row for row in found["faults"] if not row["before"][1] or not row["after"][0]]
    for row in silent:
        print(f"not shown: {row['number']} {row['fault']}: {row['before']}, {row['after']}")
    broken = any(row["after"][1] for row in found["groups"])
    return int(broken or bool(silent))


if __name__ == "__main__":
    sys.exit(main())
