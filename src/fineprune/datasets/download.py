"""Download a published file over https, check its digest, and unpack it.

Every file and folder appears under its name only when it is complete. Nothing half-written stays
behind after an error or an interrupt.
"""

import contextlib
import hashlib
import tarfile
import tempfile
import zlib
from pathlib import Path

from fineprune.errors import InputError, RunError, check_installed, explaining, first_line

_TIMEOUT_SECONDS = 60


class DownloadError(RunError, ConnectionError):
    """A file could not be fetched, for example because there is no network connection."""


def fetch(url: str, md5: str, directory: Path) -> Path:
    """Fetch a file into a directory, under the name that it has in its address; return the file.

    Args:
        url: The address; https only.
        md5: The published digest, in hexadecimal.
        directory: Where the file is written; it is created if it does not exist.

    Raises:
        DownloadError: The server cannot be reached, or does not send the file.
        InputError: The file has another digest, or it cannot be written.
    """
    if not url.startswith("https://"):
        raise InputError(f"expected an https address to download from, got {url}: use https only")
    check_installed("pooch", f"pooch to download {url}", "cli")
    import pooch

    new = not directory.exists()
    with explaining(f"expected a folder to download to, cannot create {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        written = pooch.retrieve(
            url,
            known_hash=f"md5:{md5}",
            fname=file_name(url),
            path=directory,
            downloader=pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS),
        )
    except ValueError as error:
        raise InputError(f"{first_line(error)}: download {url} again") from error
    except OSError as error:  # Those of requests, too.
        if new:
            with contextlib.suppress(OSError):  # It may hold what another process has written.
                directory.rmdir()
        raise DownloadError(
            f"expected to download {url} to {directory}, but failed: {first_line(error)}: try "
            f"again, or put {file_name(url)} there yourself"
        ) from error
    return Path(written)


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
    """Unpack a tar.gz archive that holds one folder, beside the archive, and return the folder.

    The ``data`` filter of ``tarfile`` refuses members that would be written outside.
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
            except OSError:  # Another process may have unpacked it, too, which is as good.
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
