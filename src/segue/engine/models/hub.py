"""A model of the Hugging Face Hub becomes a complete folder, in Hugging Face's own cache.

`huggingface_hub` decides where the Hub is (`HF_ENDPOINT`), who we are (`HF_TOKEN`), whether to ask at all
(`HF_HUB_OFFLINE`) and where files lie (`HF_HOME`), so a model that another program has fetched is not
fetched again. From it this module takes less than a whole repository: `config.json` first, so that a model
that cannot run is refused before its weights come; then the tokenizer and one set of weights, safetensors
where there are any. A weight file that was interrupted goes on where it stopped, also in another process:
its part lies beside the cache's blobs under a name of ours, and becomes a blob when its size and checksum are
those that the Hub names. The work is done by a thread that no end of the process waits for.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

from segue.engine.models.child import Progress, is_no_room
from segue.engine.models.folders import check_folder, check_room, read_json
from segue.engine.models.model_registry import refuse_unsupported
from segue.kv import ConfigError

log = logging.getLogger("segue.store")

#: A day for all of it, and five minutes without a byte; a large model on a slow line takes hours.
DEADLINE_S = 86400.0
SILENCE_S = 300.0

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Files that a model needs beside its weights.
_SMALL = re.compile(
    r"(config|generation_config|tokenizer_config|tokenizer|special_tokens_map|added_tokens|vocab|chat_template)"
    r"\.json|merges\.txt|vocab\.txt|chat_template\.jinja|[\w.-]*tokenizer\.model"
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ASK_S = 10.0
_BLOCK_BYTES = 4 * 2**20
#: How many bytes are written, and told of, at once.
_STEP_BYTES = 2**20


def fetch(name: str, revision: str | None, *, weights: bool, progress: Progress) -> Path:
    """The complete folder of the Hub's model `name` (checked; see `check_folder`), fetched if need be.

    `revision` is a branch, a tag or a commit (default: the Hub's). `progress` is called by another thread.
    Raises ConfigError in one sentence.
    """
    try:
        # All that is used: no process may end while a thread of it imports.
        from huggingface_hub import close_session, constants, file_download, hf_api  # noqa: F401
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as exc:
        raise ConfigError(f"Models of the Hub need the 'engine' extra: {exc}.") from exc
    constants.HF_HUB_DISABLE_TELEMETRY = True
    # A resumed download continues after the bytes on disk: write them as they come, not 10 MB at once.
    constants.DOWNLOAD_CHUNK_SIZE = _STEP_BYTES
    disable_progress_bars()
    logging.set_verbosity_error()  # its warnings are no lines of our log
    result: Future[Path] = Future()
    # A silence is counted in halves: in a process that was stopped for longer than one, it ends at once.
    half_s, quiet = SILENCE_S / 2, 0

    def say(stage: str, done: int, total: int) -> None:
        nonlocal quiet
        if result.cancelled():
            raise CancelledError
        quiet = -round(DEADLINE_S / half_s) if stage == "wait" else 0  # another process works
        progress(stage, done, total)

    def run() -> None:
        try:
            result.set_result(_fetch(name, revision, weights=weights, say=say))
        except Exception as exc:  # raised where it is waited for, if it is
            if not result.cancelled():
                result.set_exception(exc)

    threading.Thread(target=run, name="segue-hub", daemon=True).start()
    try:
        for _ in range(round(DEADLINE_S / half_s)):
            if wait([result], half_s).done or quiet > 0:
                break
            quiet += 1
        folder = result.result(0)
        close_session()
        return folder
    except ConfigError:
        raise
    except TimeoutError:
        raise ConfigError(
            f"Fetching '{name}' stopped: nothing came for {SILENCE_S:.0f} s; start again, and it goes "
            "on from where it was."
        ) from None
    except Exception as exc:  # the library's own errors are many
        text = f"'{name}' cannot be fetched: {type(exc).__name__}: {' '.join(str(exc).split())[:500]}"
        if is_no_room(exc):
            where = constants.HF_HUB_CACHE
            text = f"There is no room for '{name}' in {where} ({exc}): free some, or set HF_HOME."
        raise ConfigError(text) from exc
    finally:
        result.cancel()  # the thread ends with its next word


def wanted(files: list[str], index: Callable[[str], dict[str, Any]], *, weights: bool) -> list[str]:
    """The files of a repository that a model needs, out of `files`, weights last; `index` reads one of its
    indexes. With several sets of weights safetensors win, and a single whole file wins over shards."""
    names = [file for file in files if _SMALL.fullmatch(file)]
    for single in _WEIGHTS if weights else ():
        if single in files:
            return [*names, single]
        listing = f"{single}.index.json"
        if listing in files:
            shards = sorted({str(shard) for shard in index(listing).get("weight_map", {}).values()})
            missing = [shard for shard in shards if shard not in files or "/" in shard]
            if missing:
                raise ConfigError(f"the repository's {listing} names {missing[0]}, which it does not have.")
            return [*names, listing, *shards]
    return names


def _cached(name: str, revision: str | None, *, weights: bool) -> Path:
    """The folder in the cache. Raises ConfigError if it is not there or not complete."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ConfigError("it is not in the cache")
    return check_folder(Path(found).parent, weights=weights)


def _fetch(name: str, revision: str | None, *, weights: bool, say: Progress) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        try:
            return _cached(name, revision, weights=weights)
        except ConfigError as exc:
            raise ConfigError(
                f"HF_HUB_OFFLINE is set, and of '{name}': {exc.info.text.rstrip('.')}."
            ) from exc
    if revision is not None and _COMMIT.fullmatch(revision):
        try:
            return _cached(name, revision, weights=weights)  # a commit never changes: nobody need be asked
        except ConfigError:
            pass  # fetch what is missing
    try:
        return _download(name, revision, weights=weights, say=say)
    except (HTTPError, HfHubHTTPError, LocalEntryNotFoundError, ConnectionError) as exc:
        why = _refused(name, revision, exc, constants.ENDPOINT)
        if why:
            raise ConfigError(why) from exc
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        unreachable = f"{constants.ENDPOINT} cannot be reached ({reason})"
        try:
            folder = _cached(name, revision, weights=weights)
        except ConfigError as cached:
            text = f"{unreachable}, and of '{name}': {cached.info.text.rstrip('.')}."
            raise ConfigError(text) from exc
        log.warning("%s; '%s' is taken from the cache as it is there", unreachable, name)
        return folder


def _refused(name: str, revision: str | None, exc: Exception, endpoint: str) -> str:
    """Why the Hub itself refuses, in one sentence; nothing if it did not answer or is not well."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    token = "the token in HF_TOKEN" if get_token() else "no token (HF_TOKEN is not set)"
    if isinstance(exc, GatedRepoError):
        return (
            f"'{name}' is gated and cannot be read with {token}: accept its terms at {endpoint}/{name}, "
            "then set HF_TOKEN to a token that may read it."
        )
    if isinstance(exc, RepositoryNotFoundError):
        return (
            f"There is no model '{name}': no such folder here, and {endpoint} shows none of that name to "
            f"somebody with {token}."
        )
    if isinstance(exc, RevisionNotFoundError):
        return f"'{name}' has no revision '{revision}' (--revision)."
    status = exc.response.status_code if isinstance(exc, HfHubHTTPError) and exc.response is not None else 0
    if status in (401, 403):
        return f"{endpoint} refuses '{name}' to somebody with {token} (status {status})."
    return ""


def _download(name: str, revision: str | None, *, weights: bool, say: Progress) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    api = HfApi()
    info = api.model_info(name, revision=revision, files_metadata=True, timeout=_ASK_S)
    try:
        # By the name of the revision: the cache then knows offline which commit it means.
        folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except RemoteEntryNotFoundError as exc:
        raise ConfigError(
            f"'{name}' has no config.json, so it is no Hugging Face model; of a repository with .gguf files "
            "fetch one and give --model FILE.gguf."
        ) from exc
    commit = folder.name
    if commit != info.sha:  # it was changed between the two questions
        info = api.model_info(name, revision=commit, files_metadata=True, timeout=_ASK_S)
    try:
        refuse_unsupported(folder)
    except ConfigError as exc:
        raise ConfigError(f"'{name}' cannot run here: {exc.info.text}") from exc
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def index(file: str) -> dict[str, Any]:
        return read_json(Path(hf_hub_download(name, file, revision=commit)), file)

    files = [file for file in wanted(list(sizes), index, weights=weights) if not (folder / file).exists()]
    total = sum(sizes[file] for file in files)
    check_room(folder, total)
    done = 0
    for file in files:
        bar = _bar(say, done, total)
        if Path(file).suffix in (".safetensors", ".bin"):
            download_weights(name, file, folder, say, bar)
        hf_hub_download(name, file, revision=commit, tqdm_class=bar)
        done += sizes[file]
        say("download", done, total)
    return check_folder(folder, weights=weights)


def _bar(say: Progress, before: int, total: int) -> Any:
    """A class of progress bars, which draw nothing and say how much there is beside `before` bytes."""
    from huggingface_hub.utils import tqdm

    most = 0

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, more: float | None = 1) -> None:
            nonlocal most
            self.n += more or 0
            most = max(most, int(self.n))  # one bar may be of what came, another of what is written
            say("download", before + most, total)

    return Bar


def download_weights(name: str, file: str, folder: Path, say: Progress, bar: Any) -> None:
    """Download one file into the cache's blobs, from where an earlier process stopped."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file, revision=folder.name)
    headers = build_hf_headers()
    about = get_hf_file_metadata(url)
    if about.etag is None or about.size is None:
        return  # no Hub of today: `hf_hub_download` knows what to do
    blob = folder.parent.parent / "blobs" / about.etag
    if about.location.split("/")[:3] != url.split("/")[:3]:
        headers.pop("authorization", None)  # a signed address of somebody else's
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.segue-part")
    try:
        with part.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("wait", 0, 0)
                fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel if who has it dies
            if blob.exists():  # somebody else's work, while we waited
                part.unlink(missing_ok=True)
                return
            with part.open("r+b") as out:
                have = out.seek(0, 2)
                if have > about.size:
                    have = out.truncate(out.seek(0))
                http_get(
                    about.location,
                    out,
                    resume_size=have,
                    headers=headers,
                    expected_size=about.size,
                    tqdm_class=bar,
                )
            _check(part, about.etag, name, file, say)
            part.rename(blob)
    except OSError as exc:
        if is_no_room(exc):
            part.unlink(missing_ok=True)  # others need the room, too
        raise


def _check(part: Path, etag: str, name: str, file: str, say: Progress) -> None:
    """Refuse a file whose content is not what the Hub says. Its etag is the SHA-256 of a large file."""
    if not _SHA256.fullmatch(etag):
        return
    digest, done, total = hashlib.sha256(), 0, part.stat().st_size
    with part.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            say("hash", done, total)
    if digest.hexdigest() != etag:
        part.unlink()
        raise ConfigError(
            f"{file} of '{name}' arrived with another checksum than the Hub names: start again."
        )
