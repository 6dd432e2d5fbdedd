"""Fine-tune with the model, the data and the run in object storage, such as S3.

python -m examples.clusters.object_storage finetune s3://bucket/model \
    --train-files s3://bucket/data.jsonl --output-dir s3://bucket/run --gpus 8

Inputs are copied to a local folder first. The run is copied from its URL, so that it goes on from
the last checkpoint there, and back while it trains. A checkpoint gets its last file when all others
are there: an upload that is cut short leaves the checkpoint before it. One machine runs it.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

import fsspec

LAST = "facts.json"  # a checkpoint's folder without this file is not whole
RUN = ("run.json", "run.yaml", "metrics.jsonl", "samples.jsonl", "loss.png")


def is_url(name: str) -> bool:
    return "://" in name


def fetch(url: str, folder: Path) -> Path:
    """Copy a file or a folder, and return its local path. What is there already stays."""
    fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
    local = folder / hashlib.sha256(url.encode()).hexdigest()[:8] / root.rpartition("/")[2]
    if not fs.isdir(root):
        if not local.exists():
            download(fs, root, local)
        return local
    for file in fs.find(root):
        target = local / file[len(root) :].lstrip("/")
        if not target.exists():
            download(fs, file, target)
    return local


def download(fs: fsspec.AbstractFileSystem, file: str, local: Path) -> None:
    """Copy a file under another name first, so that its own name has all of it or is not there."""
    local.parent.mkdir(parents=True, exist_ok=True)
    part = local.with_name(f".{local.name}.part")
    fs.get_file(file, str(part))
    part.rename(local)


def restore(url: str, folder: Path) -> None:
    """Copy a run from its URL, unless the folder has one. Checkpoints that are not whole stay."""
    fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
    if (folder / "run.json").exists() or not fs.exists(f"{root}/run.json"):
        return
    files = fs.find(root)
    for file in files:
        name = file[len(root) :].lstrip("/")
        inside = file.rpartition("/")[0]
        is_folder = name.startswith("checkpoints/") and name.count("/") > 1
        if name.startswith("model/") or (is_folder and f"{inside}/{LAST}" not in files):
            continue
        download(fs, file, folder / name)


def upload(folder: Path, url: str) -> None:
    """Copy the run and its whole checkpoints to the URL, and remove older checkpoints there."""
    fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
    checkpoints = folder / "checkpoints"
    whole = [path for path in sorted(checkpoints.glob("step-*")) if (path / LAST).is_file()]
    # The files of the run come first: on resume, they are cut to the step of the checkpoint.
    for name in RUN:
        if (folder / name).is_file():
            fs.put_file(str(folder / name), f"{root}/{name}")
    there = set(fs.find(f"{root}/checkpoints")) if fs.exists(f"{root}/checkpoints") else set()
    try:
        for path in whole:
            files = [each for each in path.iterdir() if each.is_file()]
            for file in sorted(files, key=lambda each: each.name == LAST):
                name = f"{root}/{file.relative_to(folder).as_posix()}"
                if name not in there:
                    fs.put_file(str(file), name)
    except FileNotFoundError:
        return  # The run has removed this checkpoint, because it has a newer one.
    names = {path.name for path in whole}
    old = [each for each in there if each[len(f"{root}/checkpoints/") :].split("/")[0] not in names]
    for name in sorted(old, key=lambda each: not each.endswith(LAST)) if names else []:
        fs.rm_file(name)


def upload_model(folder: Path, url: str) -> None:
    """Copy the exported model, its config last."""
    fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
    files = [path for path in (folder / "model").rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda each: each.name == "config.json"):
        fs.put_file(str(file), f"{root}/{file.relative_to(folder).as_posix()}")


def main(argv: list[str]) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", type=Path, default=Path("storage"), help="folder for copies")
    parser.add_argument("--every", type=float, default=60, help="seconds between uploads")
    given, command = parser.parse_known_args(argv)
    output = command[command.index("--output-dir") + 1]
    run = given.local / "runs" / hashlib.sha256(output.encode()).hexdigest()[:8]
    if is_url(output):
        restore(output, run)
    local = [
        str(run) if each == output and is_url(each)
        else str(fetch(each, given.local / "inputs")) if is_url(each)
        else each
        for each in command
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "ligermodels", *local, "--resume"])
    while is_url(output):
        try:
            process.wait(given.every)
            break
        except subprocess.TimeoutExpired:
            upload(run, output)
    code = process.wait()
    if is_url(output):
        upload(run, output)
        if code == 0:
            upload_model(run, output)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
