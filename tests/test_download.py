"""Downloads: whole or not at all, from https only, and a missing network in one line."""

import functools
import hashlib
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from fineprune.datasets.download import DownloadError, fetch
from fineprune.errors import InputError

# pooch leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("scheme", ["http", "file", "ftp"])
def test_only_https_is_downloaded(scheme, tmp_path):
    served = tmp_path / "some-file.tar.gz"
    served.write_bytes(CONTENT)
    with pytest.raises(InputError, match="expected an https address") as error:
        fetch(f"{scheme}://{served}", MD5, tmp_path / "new")
    one_line(error)
    assert names_in(tmp_path) == ["some-file.tar.gz"]


def refused_address():
    """The address of a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"https://127.0.0.1:{probe.getsockname()[1]}/some-file.tar.gz"


def test_a_refused_connection_says_what_to_do(tmp_path):
    url = refused_address()
    with pytest.raises(DownloadError, match="Connection refused") as error:
        fetch(url, MD5, tmp_path / "new")
    message = one_line(error)
    assert url in message
    assert "put some-file.tar.gz there yourself" in message
    assert names_in(tmp_path) == []  # Nor does an empty folder stay.


class Served(http.server.BaseHTTPRequestHandler):
    """Serves ``CONTENT`` under some paths, and errors under others."""

    server: "QuietServer"

    def do_GET(self):  # the name that the base class calls
        path = self.path.strip("/").split("/")[0]
        if path == "moved":
            self.send_response(302)
            self.send_header("Location", self.server.address + "/whole/some-file.tar.gz")
        elif path in ("whole", "cut", "changed"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
        else:
            self.send_response(404)
        self.end_headers()
        if path in ("whole", "cut", "changed"):
            sent = {"whole": CONTENT, "cut": CONTENT[:100], "changed": CONTENT[::-1]}
            self.wfile.write(sent[path])

    def log_message(self, *arguments):
        pass


class QuietServer(http.server.ThreadingHTTPServer):
    """Says nothing of clients that refuse its certificate."""

    address: str
    certificate: Path

    def handle_error(self, request, client_address):
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A web server on this machine whose certificate is trusted while the tests run."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    making = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    making += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *making], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with QuietServer(("127.0.0.1", 0), Served) as running:
        running.socket = context.wrap_socket(
            running.socket, server_side=True, do_handshake_on_connect=False
        )
        running.address = f"https://127.0.0.1:{running.server_port}"
        running.certificate = certificate
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def trusted(server, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
    return functools.partial("{}/{}/some-file.tar.gz".format, server.address)


@pytest.mark.parametrize("path", ["whole", "moved"])
def test_a_file_is_fetched_from_a_server(path, trusted, tmp_path):
    written = fetch(trusted(path), MD5, tmp_path / "new/folder")
    assert written.read_bytes() == CONTENT
    assert names_in(written.parent) == ["some-file.tar.gz"]


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("missing", DownloadError, "Not Found"),
        ("cut", DownloadError, "IncompleteRead"),
        ("changed", InputError, f"does not match the known hash: expected md5:{MD5} but got"),
    ],
)
def test_a_server_that_does_not_send_the_file(path, kind, said, trusted, tmp_path):
    (tmp_path / "some-file.tar.gz").write_bytes(b"mine")
    with pytest.raises(kind, match=said) as error:
        fetch(trusted(path), MD5, tmp_path)
    one_line(error)
    assert names_in(tmp_path) == ["some-file.tar.gz"]
    assert (tmp_path / "some-file.tar.gz").read_bytes() == b"mine"


def test_an_interrupt_leaves_nothing(trusted, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pooch.core.hash_matches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(trusted("whole"), MD5, tmp_path)
    assert names_in(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_wrong_input(trusted, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"cannot create .*file/below") as error:
        fetch(trusted("whole"), MD5, tmp_path / "file/below")
    one_line(error)


def test_an_unknown_certificate_is_refused(server, tmp_path):
    with pytest.raises(DownloadError, match="CERTIFICATE_VERIFY_FAILED") as error:
        fetch(f"{server.address}/whole/some-file.tar.gz", MD5, tmp_path)
    one_line(error)
    assert names_in(tmp_path) == []
