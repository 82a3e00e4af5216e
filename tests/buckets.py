"""A server of buckets on this machine, in place of S3."""

from __future__ import annotations

import os
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "photos-of-cats"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@contextmanager
def serve_buckets() -> Iterator[Any]:
    """Yield a client of a server with one empty bucket; the environment leads vitrail and children there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what moto imports
        import boto3
        from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # What an earlier server of this process held is still there.
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
                patch.delenv(name)
            for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
                patch.setenv(name, value)
            client = boto3.client("s3")
            client.create_bucket(Bucket=BUCKET)
            yield client
            client.close()
    finally:
        forget_storages()
        server.stop()


def forget_storages() -> None:
    """Close the connections to servers, so that the next ones are made in the environment of then."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def put_folder(client: Any, folder: Path, prefix: str) -> list[str]:
    """Put the files of a folder into the bucket, and return the names of the objects."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=(folder / name).read_bytes())
    return names


def list_keys(client: Any, prefix: str) -> list[str]:
    """Return the names of all objects below a prefix, without it."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
    return sorted(each["Key"].removeprefix(f"{prefix}/") for page in pages for each in page.get("Contents", ()))


def read_key(client: Any, key: str) -> bytes:
    return client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
