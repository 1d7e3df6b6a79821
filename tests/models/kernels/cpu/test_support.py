"""Whether kernels can be used, and what is said where they cannot."""

import logging
from collections.abc import Iterator

import pytest

from dcpjax.models.kernels.cpu import support


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What `support` found out before and during the test is forgotten."""
    for function in (support.probe, support.available):
        function.cache_clear()
    yield
    for function in (support.probe, support.available):
        function.cache_clear()


def test_an_interface_of_another_version_is_left_alone():
    assert support.available()
    assert support.declared_version("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 4\n") == (0, 4)
    assert support.declared_version("") == (-1, -1)


def test_an_interface_of_another_version_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(support, "ffi_version", lambda: (0, 4))
    with caplog.at_level(logging.WARNING):
        assert [support.available() for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "CPU kernels are not in use, and models run several times more slowly: jaxlib"
    )
    assert record.getMessage().endswith(" has XLA FFI 0.4, but they are written for 0.3")
    assert support.details() == {"available": False, "reason": support.probe().reason}


def test_jaxlib_without_the_header_is_said_to_be_of_unknown_version(monkeypatch):
    monkeypatch.setattr(support, "ffi_version", lambda: (-1, -1))
    assert "has XLA FFI of unknown version, but" in str(support.probe().reason)


def test_an_installation_without_numba_is_no_reason_to_warn(monkeypatch, caplog):
    monkeypatch.setattr(support, "find_spec", lambda _: None)
    assert not support.available()
    assert caplog.records == []
    assert support.probe().reason == "numba is not installed (pip install 'dcpjax[cpu]')"


def test_threads_are_used_here_since_the_test_dependencies_bring_their_library():
    assert support.threads_are_safe()
    assert support.details()["tbb"]
