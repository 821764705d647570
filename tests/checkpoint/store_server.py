"""An S3-compatible server (moto) in this process, which tests stop and start again."""

import contextlib
import logging
import os
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


class StoreServer:
    """Server on 127.0.0.1 whose objects outlive a stop."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._server: ThreadedMotoServer | None = None
        self.env = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            # botocore retries a refused connection for 6 s before it reports it
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop()
        self._server = None


@contextlib.contextmanager
def run_server() -> Iterator[StoreServer]:
    """Context with a server that has an empty bucket, and with the environment that names it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = StoreServer()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setitem(os.environ, name, value)
        # all servers of a process have the same objects
        reset = urllib.request.Request(f"{server.env['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"")
        urllib.request.urlopen(reset).close()
        open_filesystem().mkdir(BUCKET)
        yield server
    if server._server is not None:
        server.stop()


def open_filesystem():
    """An fsspec filesystem of the server, independent of jaxsp's."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
