"""Reads the access key of an AWS profile, which the clients of object stores do not read themselves."""

from __future__ import annotations

import os
import shlex
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import suppress

from amalgam.pipeline.errors import AmalgamError, ExperimentError, short_path
from amalgam.pipeline.user_paths import expanded

PROFILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""Files of the AWS tools: their variables and defaults."""
KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
OPTIONS = {**{key: key for key in KEYS}, "region": "aws_region"}
"""Keys of a profile, and the options of polars and obstore."""
PRIOR = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
"""Variables that the AWS tools read before any profile, or that make keys unnecessary."""


def profile_options(address: str, kind: type[AmalgamError] = ExperimentError) -> dict[str, str] | None:
    """Returns the key and region of the profile AWS_PROFILE, else of the default one; None if it has no key.

    The environment has priority. Refuses a named profile without a key, such as one of a single sign-on.
    """
    name = os.environ.get("AWS_PROFILE")
    if not address.startswith("s3://") or any(map(os.environ.get, PRIOR)):
        return None
    files = {key: expanded(os.environ.get(key, default)) for key, default in PROFILES.items()}
    parser = ConfigParser(interpolation=None, strict=False)
    with suppress(ConfigError, UnicodeDecodeError):  # a message would have a line of the file
        parser.read(files.values(), "utf-8")
    sections = [parser[title] for title in (f"profile {name}", name or "default") if parser.has_section(title)]
    options = {option: section[key] for section in sections for key, option in OPTIONS.items() if key in section}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options.pop("aws_region", None)
    if "aws_access_key_id" in options:
        return options
    if name:
        what = f"the AWS profile {short_path(name)} has no access key in its files"
        fix = f'run: eval "$(aws configure export-credentials --profile {shlex.quote(name)} --format env)"'
        raise kind(what, where=str(files["AWS_SHARED_CREDENTIALS_FILE"]), fix=fix)
    return None
