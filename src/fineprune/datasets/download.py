"""Download a published file over https, check its digest, and unpack it.

Every file and folder appears under its name only when it is complete. Nothing half-written stays
behind after an error or an interrupt.
"""

import hashlib
import http.client
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import urlsplit

from fineprune.errors import InputError, RunError, explaining, reason_of

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 60


class DownloadError(RunError, ConnectionError):
    """A file could not be fetched, for example because there is no network connection."""


def fetch(url: str, md5: str, directory: Path) -> Path:
    """Fetch a file into a directory, under the name that it has in its address.

    Progress goes to standard error: a line that is rewritten on a terminal, one plain line
    elsewhere.

    Args:
        url: The address; https only, which also holds for redirects.
        md5: The published digest, in hexadecimal.
        directory: Where the file is written; it is created if it does not exist.

    Returns:
        The written file.
    """
    _require_https(url)
    opener = urllib.request.build_opener(_HttpsRedirects)
    try:
        with opener.open(url, timeout=_TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length")
            with explaining(f"expected a folder to download to, cannot create {directory}"):
                directory.mkdir(parents=True, exist_ok=True)
            return save(response, None if length is None else int(length), url, md5, directory)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is also the server's response, with an open connection
        reason = reason_of(getattr(error, "reason", None) or error)  # without urllib's layer
        raise DownloadError(
            f"expected to download {url} to {directory}, but failed: {reason}: "
            f"try again, or put {file_name(url)} there yourself"
        ) from error


def save(stream: BinaryIO, size: int | None, url: str, md5: str, directory: Path) -> Path:
    """Write the bytes of a download into an existing directory: all of them, or nothing.

    ``size`` is the number of bytes to expect; None if it is not known. Returns the written file.
    """
    received = 0
    name = file_name(url)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=directory) as unfinished:
        partial = Path(unfinished, name)
        with partial.open("xb") as file, _progress(url, size) as show:
            for chunk in iter(lambda: stream.read(_CHUNK), b""):
                file.write(chunk)
                received += len(chunk)
                show(received)
        if size is not None and received != size:
            raise InputError(f"expected {size} bytes of {url}, got {received}: download it again")
        check_digest(partial, md5, f"{url}: download it again")
        return partial.replace(directory / name)


def check_digest(path: Path, md5: str, advice: str) -> None:
    """Raise InputError unless a file has the published digest, in hexadecimal.

    ``advice`` is the end of the message: what has another digest, and what to do.
    """
    # MD5 is what is published. Systems that forbid it for security still allow this use.
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    if digest.hexdigest() != md5:
        raise InputError(f"expected MD5 {md5}, got {digest.hexdigest()} for {advice}")


def unpack(packed: Path, folder: str) -> Path:
    """Unpack a tar.gz archive that holds one folder, beside the archive.

    Members that would be written outside (by their path or through a link) are refused, by the
    ``data`` filter of ``tarfile``.

    Returns:
        The unpacked folder.
    """
    target = packed.parent / folder
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder}.", dir=packed.parent) as unfinished:
            with tarfile.open(packed, "r:gz") as tar:
                tar.extractall(unfinished, filter="data")
            unpacked = Path(unfinished, folder)
            if not unpacked.is_dir():
                raise InputError(
                    f"expected a folder {folder} inside {packed}, found none: "
                    "delete the archive and download it again"
                )
            try:
                unpacked.rename(target)
            except OSError:
                # Several processes may start on one directory at the same time. The folder of the
                # first one is as good as ours.
                if not target.is_dir():
                    raise
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(
            f"expected a whole tar.gz archive in {packed}, got {error!r} while unpacking it: "
            "check the free disk space and the permissions of the folder, or delete the "
            "archive and download it again"
        ) from error
    return target


def file_name(url: str) -> str:
    """Return the name of the file at an address."""
    return url.rpartition("/")[2]


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        try:
            _require_https(newurl)
        except InputError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_https(url: str) -> None:
    if urlsplit(url).scheme != "https":
        raise InputError(f"expected an https address to download from, got {url}: use https only")


@contextmanager
def _progress(url: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told the number of bytes received so far, and shows it."""
    if not sys.stderr.isatty():
        print(f"downloading {url}", file=sys.stderr, flush=True)
        yield lambda received: None
        return
    total = "" if size is None else f" of {size / 1e6:.0f}"

    def show(received: int) -> None:
        line = f"\rdownloading {url}: {received / 1e6:.0f}{total} MB"
        print(line, end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(file=sys.stderr, flush=True)
