"""Foreign text is one printable line, is no Markdown, and shows no secret; what readers need is left as it is."""

import pytest
from unit_helpers import REPOSITORY

from shim._errors import OptionError
from shim._printing.markdown import cell, code, inline, plain
from shim._printing.masks import MASK, masked, masked_data, masked_variable
from shim._printing.printable import LIMIT, fits, one_line, printable
from shim._tools import output

SECRET = "pl4nted"
MIXED = "Abcdefghij0123456789Abcdefghij0123456789"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0.16.1", "0.16.1"),
        ("a\n### b\r\n\n c", "a ### b c"),
        ("a\u2028b\x85c", "a b c"),
        ("\x1b[31mred\x9b0m", r"\x1b[31mred\x9b0m"),
        ("\u202eabc\u200b\u2066\ufeff", r"\u202eabc\u200b\u2066\ufeff"),
        ("caf\udce9 é", r"caf\udce9 é"),
        ("\u3164\u2800\ufe0f", r"\u3164\u2800\ufe0f"),
        ("a" + "\u0301" * 9, "a" + "\u0301" * 3 + r"\u0301" * 6),
        ("two  spaces", "two  spaces"),
    ],
)
def test_foreign_text_is_one_line_that_shows_all_it_has(text, line):
    """Escapes instead of controls, bidi, zero-width and undecodable characters; a space instead of a line end."""
    assert one_line(text) == line
    assert one_line(line) == line


def test_long_text_is_cut_and_says_so():
    assert one_line("x" * 10 * LIMIT) == "x" * LIMIT + "..."


def test_text_of_many_lines_keeps_them():
    assert printable("a\n\tb\x1b\r") == "a\n\tb\\x1b\\r"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8", None, "no-such-encoding"])
def test_any_stream_can_print_any_text(encoding):
    said = fits("é € \u4e2d \udce9", encoding)
    assert said.encode("utf-8")
    if encoding and encoding != "no-such-encoding":
        assert said.encode(encoding)


def test_errors_of_shim_are_one_printable_line():
    """They quote arguments, variables and files."""
    assert str(OptionError("a\n# b\x1b")) == r"a # b\x1b"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/x",
        f"git+https://{SECRET}@host/x",
        f"https://user:{SECRET}/x@host",
        f"https:/user:{SECRET}@host/as/a/path",
        f"user:{SECRET}@host:/tree",
        f"https://host/x?token={SECRET}",
        f"https://host/x?a=1&X-Amz-Signature={SECRET}",
        f"https://host/x?opaque={MIXED}{SECRET}",
        f"hf_{SECRET}abcdefgh",
        f"ghp_{SECRET}abcdefghijklmnop",
        f"github_pat_{SECRET}abcdefghijklmnop",
        f"sk-ant-{SECRET}abcdefghijklmnop",
        f"glpat-{SECRET}abcdefghijklmnop",
        f"Authorization: Basic {SECRET}",
        f"curl -H 'Bearer {SECRET}abcdefgh'",
        f"cannot run: WANDB_API_KEY={SECRET} python x.py",
        f"x.py --hf-token {SECRET} --api-key={SECRET}",
        f"{{'password': '{SECRET}'}}",
        f'{{"api_key": "{SECRET}"}}',
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----",
        f'{{"password": "hun\\"{SECRET}"}}',
        f"dckr_pat_{SECRET}abcdefghijklmnop",
        f"hvs.{SECRET}abcdefghijklmnop",
        f"tskey-auth-{SECRET}abcdefghijk",
    ],
)
def test_secrets_in_text_are_masked_by_their_shape(text):
    """In the middle of a text too, and once is enough."""
    for around in (text, f"no such file: {text} (line 3)", f"/lib:{text}:/other" if "://" in text else text):
        assert SECRET not in masked(around)
        assert MASK in masked(around)
        assert masked(masked(around)) == masked(around)
    assert masked("AKIAIOSFODNN7EXAMPLE") == MASK


@pytest.mark.parametrize(
    "name",
    ["VERL_API_KEY", "PRIMUS_PASSWORD", "NCCL_AUTH_SECRET", "X_TOKEN", "MY_PASSWD", "A_PASSPHRASE", "AWS_CREDENTIALS"]
    + ["SESSION_COOKIE", "DB_PASS", "DB_PWD", "GITHUB_PAT", "SENTRY_DSN", "SLACK_WEBHOOK", "privateKey", "APIKEY2"],
)
def test_a_variable_whose_name_says_secret_is_masked_whole(name):
    assert masked_variable(name, f"two words, {SECRET}\nand a line") == MASK


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVTE_KEY_CACHE", "1"),
        ("VERL_MAX_TOKENS", "4096"),
        ("NCCL_DEBUG", "INFO"),
        ("LD_LIBRARY_PATH", "/usr/lib:/nix/store/0123456789abcdef0123456789abcdef-lib"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("VERL_COMMIT", "0123456789abcdef0123456789abcdef01234567"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        ("MEGATRON_SHIM_OPTIONS", '{"paged-stash": {"moe_paged_stash": true}}'),
        ("NVTE_BYPASS", "yes please"),
    ],
)
def test_a_variable_that_is_no_secret_is_shown(name, value):
    assert masked_variable(name, value) == value


def test_a_long_random_value_of_a_variable_is_masked():
    assert masked_variable("VERL_RUN", MIXED) == MASK
    assert masked_variable("VERL_RUN", "0123456789abcdef" * 2) == MASK


def test_homes_are_masked(monkeypatch):
    """One's own is ~, and of another the name goes."""
    monkeypatch.setenv("HOME", "/data/zoë/")
    assert masked("in /data/zoë/x.py:3 and '/data/zoë'") == "in ~/x.py:3 and '~'"
    assert masked("file:///data/zoë/x:/data/zoë2/y") == "file://~/x:/data/zoë2/y"
    assert masked("/home/alice/x:/lustre/home/bob/y") == f"/home/{MASK}/x:/lustre/home/{MASK}/y"
    monkeypatch.setenv("HOME", "/")
    assert masked("/usr/lib") == "/usr/lib"


def test_data_is_masked_at_any_depth():
    data = {"a": [{"b": f"https://u:{SECRET}@h"}, 1, None, True], f"ghp_{SECRET}abcdefghijklmnop": 1.5}
    assert masked_data(data) == {"a": [{"b": f"https://{MASK}@h"}, 1, None, True], MASK: 1.5}


def test_the_name_of_a_setting_is_no_secret():
    """--hf-checkpoint of slime, whose name a note of `shim plan --config` lists, begins as a token does."""
    assert masked("ignored: hf_checkpoint, hf_config_path") == "ignored: hf_checkpoint, hf_config_path"


def test_nothing_that_shim_says_itself_is_masked(monkeypatch):
    """Docstrings, docs and the matrix speak of keys and tokens, and hold versions, digests and URLs."""
    monkeypatch.setenv("HOME", "/nonexistent")
    folders = [("shim", "*.py"), ("patches", "*.py"), ("maintenance", "*.py"), ("patches", "*.yaml"), ("docs", "*.md")]
    files = [
        file for folder, what in folders for file in (REPOSITORY / folder).rglob(what) if "_printing" not in str(file)
    ]
    files += [REPOSITORY / "version_matrix.yaml", REPOSITORY / "README.md"]
    texts = {str(file): file.read_text("utf-8") for file in files}
    assert not [file for file, text in texts.items() if masked(text) != text]


def test_a_long_text_is_masked_in_time_that_grows_with_its_length():
    """A value of a hundred thousand characters is no hang."""
    for piece in ("a", "-", "+", "a.", ":", "/", "a:", "'", "A_", "--a", "?a", "://", "@"):
        masked(piece * (20_000 // len(piece)))


def test_foreign_text_is_no_markdown():
    hostile = "<b> [x](y) ![z](u) *c* __d__ &amp; # e @f ~~g~~ h_i ~/j `k` | l\n# m"
    assert inline(hostile) == (
        r"\<b\> \[x\](y) !\[z\](u) \*c\* \_\_d\_\_ \&amp; \# e \@f \~\~g\~\~ h_i ~/j `k` | l \# m"
    )
    assert cell("a | `b|c`") == r"a \| `b\|c`"
    assert plain("`a`") == r"\`a\`"
    assert inline("lone ` tick <") == r"lone \` tick \<"


@pytest.mark.parametrize(("text", "shown"), [("a", "`a`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("a\n# b", "`a # b`")])
def test_code_ends_where_it_should(text, shown):
    assert code(text) == shown


def test_markdown_to_be_pasted_has_whole_lines_and_text_has_80_columns(capsys, monkeypatch):
    """A line break in a comment of GitHub's is one on the page."""
    monkeypatch.delenv("COLUMNS")
    line = "word " * 40 + "end"
    output.put({}, line, False, whole=True)
    output.put({}, line, False)
    whole, *wrapped = capsys.readouterr().out.splitlines()
    assert whole == line and len(wrapped) == 3 and all(len(one) <= 80 for one in wrapped)
