"""Which names mark values as secrets, and how values and command lines look without them."""

from __future__ import annotations

import shlex
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest

from captured_warnings import captured_warnings
from drivetrain._config.secret_values import SecretFilter, arguments_without_secrets, names_a_secret, without_secrets

# The private functions: a run for each of these names and values would take long. tests/unit/engine/test_secrets.py
# shows their effect in runs.
SECRET = """
token api_token API_TOKEN apiToken HFToken hf_token token2 bot_token access_token password db_password DB-PASSWORD
passwords passwd secret client_secret clientSecret passphrase api_key apiKey api-key APIKey apikey wandb_api_key
OPENAI_API_KEY api_keys access_key aws_secret_access_key aws_access_key_id model.api_token token_file
private_key privateKey ssh_private_key_path PRIVATE-KEY pwd db_pwd ftpPwd credential credentials gcp_credentials creds
auth basic_auth auth_header Authorization X-Auth Proxy-Authorization bearer bearer_value cookie Set-Cookie cookies
session_cookie authkey wandb_key WANDB_KEY wandbKey hf_key aws_key aws_sagemaker_key AWS_S3_KEY openai_key ssh_key
encryption_key signing_keys X-Api-Key azure_account_key privatekey secretkey PGPASSWORD dbpassword clientsecret
AWSSecretKey hf_key_file oauth passcode jwt neptune_key service_account_key model.hub.credentials auth_file
"""
PLAIN = """
pad_token eos_token bos_token unk_token cls_token sep_token mask_token image_token token_mixer token_pooling
prompt_token fim_token register_token token_reduction padToken decoder_start_token token_ids token_id eos_token_id
special_tokens max_tokens num_tokens tokens tokenizer tokenize token_type key keys api access monkey pass compass
secretary keyboard api_version map_key accessor lr width author authors authority oauth_scopes auth_type auth_method
auth_url auth_user primary_key sort_key foreign_key partition_key aws_partition_key cache_key public_key
key_padding_mask num_key_value_heads hotkey turnkey key_dim query_key_norm key_name hf_image_key huggingface_text_key
wandb_metric_key google_key_points hf_keys_to_ignore bearing forbearer cookiecutter accreditation cookie_domain awsome
private private_repo is_private pwdist s3_key label_key sample_key hf_model wandb
"""


def test_names_of_secrets_and_names_that_resemble_them() -> None:  # J-11, Q-08
    assert [name for name in (*SECRET.split(), "API Key") if not names_a_secret(name)] == []
    assert [name for name in (*PLAIN.split(), "") if names_a_secret(name)] == []


@dataclass
class Login:
    user: str
    password: str
    hosts: list[str] = field(default_factory=list)


Point = namedtuple("Point", ["x", "api_key"])
NO_TEXT: tuple[Any, ...] = (3, 0.5, True, None, "", [], {}, [1, 2])


@pytest.mark.parametrize(
    ("values", "kept", "left_out"),
    [
        ({"api_token": "sk-1", "lr": 0.1}, {"lr": 0.1}, ["api_token"]),
        # Only text can be a secret, not numbers, switches, None or an empty text.
        *(({"token": value}, {"token": value}, []) for value in NO_TEXT),
        ({"password": b"raw"}, {}, ["password"]),
        ({"api_keys": ["a", "b"], "n": 1}, {"n": 1}, ["api_keys"]),
        ({"secret": {"of": {"prod": "x"}}}, {}, ["secret"]),
        ({"db": {"user": "u", "password": "p"}}, {"db": {"user": "u"}}, ["db.password"]),
        ({"hosts": [{"n": 1}, {"n": 2, "pwd": "p"}]}, {"hosts": [{"n": 1}, {"n": 2}]}, ["hosts.1.pwd"]),
        ({"pair": ({"token": "t"}, 1)}, {"pair": ({}, 1)}, ["pair.0.token"]),
        ({"login": Login("u", "p", ["h"])}, {"login": {"user": "u", "hosts": ["h"]}}, ["login.password"]),
        ({"point": Point(1, "k")}, {"point": {"x": 1}}, ["point.api_key"]),
        ({3: "three", (1, 2): {"token": "t"}}, {3: "three", (1, 2): {}}, ["(1, 2).token"]),
        ({"pad_token": "<pad>", "tokenizer": "bpe", "max_tokens": "8"}, None, []),
        # Q-08
        ({"auth": ("user", "p"), "lr": 1}, {"lr": 1}, ["auth"]),
        ({"headers": {"Authorization": "a", "Accept": "b"}}, {"headers": {"Accept": "b"}}, ["headers.Authorization"]),
        ({"headers": [["Accept", "*/*"], ["Cookie", "x"]], "n": 1}, {"n": 1}, ["headers"]),
        ({"http_headers": ("Accept: */*", "X-Api-Key: x")}, {}, ["http_headers"]),
        ({"header": "Authorization: Bearer x"}, {}, ["header"]),
        ({"headers": [["Accept", "*/*"], "Host: a.org"], "header": "Note: a, b"}, None, []),
        ({"fields": ["password", "email"], "prompt": "Authorization: none"}, None, []),
        ({"url": "postgres://u:p@h/db", "lr": 1}, {"lr": 1}, ["url"]),
        ({"db": {"urls": ["s3://a", "redis://:p@h:1"], "n": 1}}, {"db": {"n": 1}}, ["db.urls"]),
        ({"note": "from https://u:p%40@h/a and s3://b"}, {}, ["note"]),
        ({"servers": [{"url": "ftp://u:p@h", "n": 1}]}, {"servers": [{"n": 1}]}, ["servers.0.url"]),
        ({"url": "https://u@h:8080/a:b@c", "git": "git@h:a/b.git"}, None, []),
        ({"ratio": "1:2@3", "port": "http://h:80/@x"}, None, []),
        ({"url": "https://u:***@h", "other": "https://u:...@h"}, None, []),
    ],
)
def test_values_without_secrets(values: Any, kept: Any, left_out: list[str]) -> None:  # J-11
    before = repr(values)
    found = without_secrets(values)
    assert found == (values if kept is None else kept, left_out)
    assert repr(values) == before  # the user's values do not change


def test_objects_without_secrets_and_recursive_values_are_passed_through() -> None:
    objects = {"login": Login("u", ""), "count": Counter("aab"), "point": Point(1, 2), "type": Login}
    kept, _ = without_secrets(objects)
    assert all(kept[name] is value for name, value in objects.items())
    values: dict[str, Any] = {"token": "t"}
    values["self"] = values["again"] = values
    kept, left_out = without_secrets(values)
    assert "token" not in kept
    assert left_out[0] == "token"
    ring: list[Any] = []
    ring += [ring, ring]
    assert without_secrets({"password": ring, "other": ring})[1] == []


@pytest.mark.parametrize(
    ("arguments", "kept", "left_out"),
    [
        ("t.py --api_token=sk-1 --lr=0.1", "t.py --api_token=... --lr=0.1", ["--api_token"]),
        ("t.py --api_token secret_key_1=", "t.py --api_token ...", ["--api_token"]),
        ("t.py --api-token sk-1 fit", "t.py --api-token ... fit", ["--api-token"]),
        ("--model.password a=b", "--model.password ...", ["--model.password"]),
        ("model.hf_token=t x=1", "model.hf_token=... x=1", ["model.hf_token"]),
        ("--use_secret --epochs 3", None, []),
        ("--pad_token=<pad> --max_tokens 8", None, []),
        ("""--model='{"api_key": "k", "n": 1}'""", "--model=...", ["--model.api_key"]),
        ("--db '{user: u, password: p}'", "--db ...", ["--db.password"]),
        ("""--db '{"user": "u"}'""", None, []),
        ("--token", None, []),
        # Q-08
        ("--wandb_key k --sort_key date", "--wandb_key ... --sort_key date", ["--wandb_key"]),
        ("-H 'Authorization: Bearer x'", "-H 'Authorization: ...'", ["Authorization"]),
        ("'--header=Cookie: x' -H 'Host: h'", "'--header=Cookie: ...' -H 'Host: h'", ["Cookie"]),
        ("--db=redis://u:p@h/1", "--db=redis://u:...@h/1", ["--db"]),
        ("--db redis://u:p@h/1 s3://:p@b", "--db redis://u:...@h/1 s3://:...@b", ["--db", "s3://:...@b"]),
        ("--url=http://u@h:8/a a:b@c", None, []),
        ("--token= a", None, []),
        ("--set hub.token=a -o lr=1", "--set hub.token=... -o lr=1", ["hub.token"]),
        ("-H Cookie:x secret://vault/a", "-H 'Cookie: ...' secret://vault/a", ["Cookie"]),
        ("--db=sql://u:a/b#c@h/d", "--db=sql://u:...@h/d", ["--db"]),
        ("""http://h:80/a@b "{'h':'http://h:80','m':'x@y'}\"""", None, []),
    ],
)
def test_a_command_line_without_secrets(arguments: str, kept: str | None, left_out: list[str]) -> None:  # J-11
    given = shlex.split(arguments)
    assert arguments_without_secrets(given) == (given if kept is None else shlex.split(kept), left_out)


def test_omitted_values_are_reported_once() -> None:  # J-11
    left_out = SecretFilter()
    with captured_warnings() as lines:
        kept, names = left_out.take_out({"api_token": "sk-1", "db": {"password": "p"}, "lr": 1})
        assert (kept, names) == ({"db": {}, "lr": 1}, ["api_token", "db.password"])
        assert left_out.take_out({"api_token": "sk-1", "lr": 1}) == ({"lr": 1}, ["api_token"])
    (line,) = lines
    assert "'api_token', 'db.password'" in line
    assert "sk-1" not in line
    with captured_warnings() as lines:
        left_out.take_out({"other_token": "t", "api_token": "sk-1"})
    assert len(lines) == 1
    assert "'other_token'" in lines[0]
    assert "api_token" not in lines[0]
