"""Runs tests against moto's S3 server: python tests/on_moto.py PYTHON_WITH_MOTO TEST...

The server has an interpreter of its own, since moto needs other versions of libraries than amalgam is tested with.
"""

from __future__ import annotations

import os
import subprocess
import sys

SERVER = """
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
print(url, flush=True)
input()
"""


def main() -> int:
    python, *tests = sys.argv[1:]
    command = [python, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        if server.stdout is None:
            raise AssertionError
        try:
            url = server.stdout.readline().strip()
            around = {**os.environ, "AMALGAM_TEST_S3": url}
            pytest = [sys.executable, "-m", "pytest", "--numprocesses", "1"]  # a worker may crash: see conftest.py
            return subprocess.run([*pytest, *tests], check=False, env=around).returncode
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
