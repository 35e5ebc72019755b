"""scripts/wheels.py: headers out of Debian's package, and names. `make wheels` and `make wheel-test` do the rest."""

from __future__ import annotations

import hashlib
import io
import lzma
import sys
import tarfile
import urllib.error
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import wheels

INTERPRETER = wheels.interpreter


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(wheels, "interpreter", lambda python: None)


def _package() -> bytes:
    """A Debian package with two headers, one of them in the architecture's folder."""
    files = {
        "./usr/include/python3.14/Python.h": b"// Python.h",
        "./usr/include/python3.14/internal/pycore.h": b"// pycore",
        "./usr/include/python3.14/pyconfig.h": b"// includes another",
        "./usr/include/aarch64-linux-gnu/python3.14/pyconfig.h": b"// for the architecture",
        "./usr/share/doc/copyright": b"",
    }
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data.getvalue()}
    parts = [b"!<arch>\n"]
    for name, body in members.items():
        parts += [f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode(), body, b"\n" * (len(body) % 2)]
    return b"".join(parts)


def test_a_free_threaded_python_is_not_taken_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs both names."""
    for version, free, name in (("9.9.1t", 1, "python9.9t"), ("9.9.1t", 1, "python9.9"), ("9.9.1", 0, "python9.9")):
        place = tmp_path / ".pyenv" / "versions" / version / "bin" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\necho {free}\n")
        place.chmod(0o755)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert str(INTERPRETER("9.9")).endswith("9.9.1/bin/python9.9")
    assert str(INTERPRETER("9.9t")).endswith("9.9.1t/bin/python9.9t")


def test_headers_come_from_debian_if_no_interpreter_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package()
    digest = hashlib.sha256(package).hexdigest()
    index = f"Package: other\n\nPackage: libpython3.14-dev\nFilename: pool/it.deb\nSHA256: {digest}\n\nPackage: last\n"
    served = {"dists/sid/main/binary-arm64/Packages.xz": lzma.compress(index.encode()), "pool/it.deb": package}
    monkeypatch.setattr(wheels, "_download", lambda url: served[url.removeprefix(f"{wheels.DEBIAN}/")])
    folder = wheels.headers("3.14")
    assert (folder / "pyconfig.h").read_text() == "// for the architecture"
    assert sorted(path.name for path in folder.rglob("*.h")) == ["Python.h", "pyconfig.h", "pycore.h"]
    free_threaded = (wheels.headers("3.14t") / "pyconfig.h").read_text()
    assert "#define Py_GIL_DISABLED 1" in free_threaded
    assert "Py_GIL_DISABLED" not in (folder / "pyconfig.h").read_text()
    with pytest.raises(wheels.Unavailable, match=r"Debian has no package"):
        wheels.headers("3.12")
    served["pool/it.deb"] = package + b"x"
    with pytest.raises(SystemExit, match="not the file that Debian's index names"):
        wheels._from_debian("3.14", wheels.CACHE / "again")


def test_a_wheel_without_headers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str) -> bytes:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(wheels, "_download", unreachable)
    with pytest.raises(
        wheels.Unavailable, match=r"no Python 3\.14 is installed, and Debian cannot be reached: no network"
    ):
        wheels.headers("3.14t")


def test_names() -> None:
    target = wheels.TARGETS["cp314t-x86_64"]
    assert (target.python, target.abi, target.platform) == ("3.14t", "cp314t", "manylinux_2_28_x86_64")
    assert len(wheels.TARGETS) == 12
