"""Builds ringway's wheels for manylinux_2_28: both architectures, every supported CPython (make wheels).

    python scripts/wheels.py                      all of them, into dist/
    python scripts/wheels.py cp311-aarch64        some of them
    python scripts/wheels.py --sdist              the source distribution only

zig compiles for both architectures against glibc 2.28, whatever this machine has, and links its C++ runtime into the
module. The part that unwinds stacks comes from libgcc_s instead: pthread_exit unwinds with that, and the module must
use the same. A stand-in with the names of its functions is enough to link with.

A wheel needs only the headers of its Python. They come from an interpreter that is installed here (PATH, pyenv, uv), or
from Debian's package. Headers of one architecture serve both: `pyconfig.h` differs in nothing that an extension sees.
Free-threaded Python has the same headers with `Py_GIL_DISABLED` defined. A wheel whose headers cannot be found is named
and left out; the others are built.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import proofs

CACHE = proofs.ROOT / ".cache" / "wheels"
DIST = proofs.ROOT / "dist"
GLIBC = "2.28"
ARCHITECTURES = ("aarch64", "x86_64")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
TOOLS = ("ziglang==0.17.0", "auditwheel==6.8.2", "wheel==0.48.0", "build==1.6.1", "cmake", "ninja")
PINNED = ("scikit-build-core", "nanobind")
"""Their versions are those of constraints.txt."""
DEBIAN = "https://deb.debian.org/debian"
UNWIND = (
    *("Backtrace", "DeleteException", "FindEnclosingFunction", "ForcedUnwind", "GetCFA", "GetDataRelBase", "GetGR"),
    *("GetIP", "GetIPInfo", "GetLanguageSpecificData", "GetRegionStart", "GetTextRelBase", "RaiseException", "Resume"),
    *("Resume_or_Rethrow", "SetGR", "SetIP"),
)
"""libgcc_s has these, with `_Unwind_` before each."""
_INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"
_FREE = "import sysconfig; print(int(bool(sysconfig.get_config_var('Py_GIL_DISABLED'))))"


class Unavailable(Exception):
    """Why a wheel cannot be built here."""


@dataclass(frozen=True)
class Target:
    python: str
    architecture: str

    @property
    def abi(self) -> str:
        return "cp" + self.python.replace(".", "")

    @property
    def name(self) -> str:
        return f"{self.abi}-{self.architecture}"

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.architecture}"


TARGETS = {target.name: target for target in (Target(p, a) for p in PYTHONS for a in ARCHITECTURES)}


def tools() -> Path:
    """An environment with what builds wheels. Made on first use, and again for other versions."""
    folder, wanted = CACHE / "tools", "\n".join(TOOLS)
    done = folder / "wanted.txt"
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(proofs.ROOT / "constraints.txt"), *PINNED, *TOOLS], check=True)
        done.write_text(wanted)
    return folder / "bin"


def interpreter(python: str) -> Path | None:
    """An installed CPython of this version, such as 3.14t."""
    name = f"python{python}"
    places = [Path(found) for found in [shutil.which(name)] if found]
    homes = Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python"
    for home in homes:
        places += sorted(home.glob(f"*/bin/{name}"), reverse=True)
    for place in places:
        # pyenv has a stand-in for every version, whether chosen or not. A free-threaded Python has both names.
        asked = subprocess.run([str(place), "-c", _FREE], check=False, capture_output=True, text=True)
        if asked.returncode == 0 and (asked.stdout.strip() == "1") == python.endswith("t"):
            return place
    return None


def headers(python: str) -> Path:
    """The folder with Python.h."""
    found = interpreter(python)
    if found is not None:
        asked = subprocess.run([str(found), "-c", _INCLUDE], check=True, capture_output=True, text=True)
        folder = Path(asked.stdout.strip())
        if (folder / "Python.h").exists():
            return folder
    folder = CACHE / f"python{python}"
    if not (folder / "Python.h").exists():
        fresh = CACHE / f"python{python}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        if python.endswith("t"):
            shutil.copytree(headers(python.removesuffix("t")), fresh)
            with (fresh / "pyconfig.h").open("a") as config:
                config.write("\n#define Py_GIL_DISABLED 1\n")
        else:
            _from_debian(python, fresh)
        fresh.rename(folder)
    return folder


def _from_debian(python: str, folder: Path) -> None:
    """Unpacks the headers of Debian's package into `folder`."""
    try:
        index = lzma.decompress(_download(f"{DEBIAN}/dists/sid/main/binary-arm64/Packages.xz")).decode()
        about = re.search(rf"^Package: libpython{re.escape(python)}-dev\n(?:.+\n)*", index, re.MULTILINE)
        if about is None:
            raise Unavailable(f"no Python {python} is installed, and Debian has no package of its headers")
        facts = dict(re.findall(r"^(Filename|SHA256): (.+)$", about.group(), re.MULTILINE))
        package = _download(f"{DEBIAN}/{facts['Filename']}")
    except urllib.error.URLError as error:
        raise Unavailable(f"no Python {python} is installed, and Debian cannot be reached: {error.reason}") from None
    if hashlib.sha256(package).hexdigest() != facts["SHA256"]:
        raise SystemExit(f"{facts['Filename']} is not the file that Debian's index names")
    data = next(body for name, body in _members(package) if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            _, sep, inside = member.name.partition(f"/include/python{python}/")
            for_architecture = f"linux-gnu/python{python}/pyconfig.h"
            if member.name.endswith(for_architecture):  # the other pyconfig.h only includes this one
                inside = "pyconfig.h"
            elif not sep or inside == "pyconfig.h":
                continue
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                (folder / inside).write_bytes(file.read())


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
    return body


def _members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of an ar archive, which a Debian package is."""
    at = len(b"!<arch>\n")
    while at < len(package):
        name, size = package[at : at + 16].decode().strip(), int(package[at + 48 : at + 58])
        yield name, package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def compiler(bin_folder: Path, architecture: str) -> Path:
    """A folder with zig as a C++ compiler for this architecture, its ar and ranlib, and libgcc_s to link with."""
    asked = [str(bin_folder / "python"), "-c", "import ziglang; print(ziglang.__path__[0])"]
    zig = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip(), "zig")
    folder = CACHE / architecture
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in {
        "c++": f"c++ -target {architecture}-linux-gnu.{GLIBC}",
        "ar": "ar",
        "ranlib": "ranlib",
    }.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{zig}" {command} "$@"\n')
        script.chmod(0o755)
    source = folder / "libgcc_s.cpp"
    source.write_text("".join(f'extern "C" void _Unwind_{name}() {{}}\n' for name in UNWIND))
    library = ["-shared", "-nostdlib", "-Wl,-soname,libgcc_s.so.1", "-o", "libgcc_s.so.1", source.name]
    subprocess.run([str(folder / "c++"), *library], check=True, cwd=folder, env=_variables(bin_folder))
    return folder


def _variables(bin_folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(CACHE / "zig"),
    }


def build(target: Target, bin_folder: Path) -> Path:
    """Builds one wheel, names its platform, and checks it."""
    include, tool = headers(target.python), compiler(bin_folder, target.architecture)
    given = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.architecture,
        "CMAKE_CXX_COMPILER": tool / "c++",
        "CMAKE_AR": tool / "ar",
        "CMAKE_RANLIB": tool / "ranlib",
        "CMAKE_MODULE_LINKER_FLAGS": tool / "libgcc_s.so.1",
        "Python_INCLUDE_DIR": include,
    }
    soabi = f"cpython-{target.abi.removeprefix('cp')}-{target.architecture}-linux-gnu"
    variables = {
        **_variables(bin_folder),
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in given.items()),
        "SETUPTOOLS_EXT_SUFFIX": f".{soabi}.so",  # scikit-build-core would take that of the Python that runs it
    }
    made = CACHE / "made" / target.name
    shutil.rmtree(made, ignore_errors=True)
    # All versions share a folder: what needs no Python is compiled once. What CMake found out about Python is not kept.
    folder = proofs.ROOT / "build" / "wheels" / target.architecture
    (folder / "CMakeCache.txt").unlink(missing_ok=True)
    command = [str(bin_folder / "python"), "-m", "build", "--wheel", "--no-isolation", "--outdir", str(made)]
    built = subprocess.run(
        [*command, f"-Cbuild-dir={folder}", str(proofs.ROOT)],
        check=False,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode != 0:
        raise SystemExit(f"{target.name}: the build failed\n{built.stdout[-6000:]}")
    (wheel,) = made.glob("*.whl")
    tags = ["--python-tag", target.abi.removesuffix("t"), "--abi-tag", target.abi, "--platform-tag", target.platform]
    subprocess.run(
        [str(bin_folder / "wheel"), "tags", "--remove", *tags, str(wheel)], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = made.glob("*.whl")
    check(wheel, target, bin_folder)
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(wheel, DIST / wheel.name))


def check(wheel: Path, target: Target, bin_folder: Path) -> None:
    """auditwheel reads which symbols of which libraries the module needs."""
    shown = subprocess.run(
        [str(bin_folder / "auditwheel"), "show", str(wheel)], check=False, capture_output=True, text=True
    )
    said = " ".join((shown.stdout + shown.stderr).split())
    found = re.search(r'following platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', said)
    fits = found is not None and (int(found[1]), int(found[2])) <= tuple(map(int, GLIBC.split(".")))
    if not fits or found is None or found[3] != target.architecture:
        raise SystemExit(f"{wheel.name} is not {target.platform}: {said}")


def sdist(bin_folder: Path) -> Path:
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("ringway-*.tar.gz"):
        old.unlink()
    command = [str(bin_folder / "python"), "-m", "build", "--sdist", "--no-isolation", "--outdir", str(DIST)]
    subprocess.run([*command, str(proofs.ROOT)], check=True, stdout=subprocess.DEVNULL)
    (made,) = DIST.glob("ringway-*.tar.gz")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--sdist", action="store_true", help="the source distribution only")
    given = parser.parse_args()
    bin_folder = tools()
    if not given.targets:
        print(sdist(bin_folder).relative_to(proofs.ROOT))
    missing = 0
    for name in [] if given.sdist else given.targets or TARGETS:
        try:
            wheel = build(TARGETS[name], bin_folder)
        except Unavailable as why:
            missing += 1
            print(f"{name}: not built: {why}", file=sys.stderr)
        else:
            print(f"{wheel.relative_to(proofs.ROOT)}, {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
