"""A local server that speaks S3's protocol, with one bucket, and what the environment has to say of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from heavy import need

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/EXAMPLEKEY"


@contextlib.contextmanager
def serve_bucket(name: str = "bucket") -> Iterator[Any]:
    """The client of a server with an empty bucket; within, AWS's variables name the server."""
    files = need("s3fs").S3FileSystem
    files.clear_instance_cache()  # of another server
    server = need("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket=name)
        yield client
    files.clear_instance_cache()
    server.stop()


def read_bucket(client: Any, prefix: str = "", *, bucket: str = "bucket") -> dict[str, bytes]:
    """All objects below a prefix, by their keys without it."""
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        one["Key"].removeprefix(prefix): client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read()
        for one in listed
    }
