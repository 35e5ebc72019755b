"""The functions that a C source declares or defines under oneCCL's names: result and argument types by name.

    python scripts/oneccl_api.py ccl.h ccl_types.h > tests/backends/data/oneccl_api.json

records the real header. The tests compare the stand-in and ringway's own prototypes with the record.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_FUNCTION = re.compile(
    r"(?P<result>onecclResult_t|const char|void)\s+(?:CCL_C_\w+\s+)*(?P<pointer>\*?)\s*"
    r"(?P<name>oneccl\w+)\s*\((?P<arguments>[^)]*)\)\s*[;{]"
)
_VALUE = re.compile(r"\b(oneccl\w+|ONECCL_UNIQUE_ID_BYTES)\s*(?:=\s*|\s)(\d+)\s*[,\n}]")


def functions(source: str) -> dict[str, list[Any]]:
    """Each function's result type and argument types, without names, `const` and spacing."""
    text = _PREPROCESSOR.sub("", _COMMENTS.sub("", source))
    return {
        found["name"]: [
            _plain(found["result"] + found["pointer"]),
            [_type_of(argument) for argument in found["arguments"].split(",") if argument.strip()],
        ]
        for found in _FUNCTION.finditer(text)
    }


def values(source: str) -> dict[str, int]:
    """The constants of the enums, and the size of the unique id."""
    return {name: int(value) for name, value in _VALUE.findall(_COMMENTS.sub("", source))}


def _type_of(argument: str) -> str:
    declared = re.match(r"(.*?)(\w+)\s*$", argument.strip(), re.DOTALL)
    return _plain(declared.group(1) if declared else argument)


def _plain(declared: str) -> str:
    return re.sub(r"\s+", "", declared.replace("const ", "")).replace("*", " *").strip()


if __name__ == "__main__":
    header, types = (Path(name).read_text() for name in sys.argv[1:])
    print(json.dumps({"functions": functions(header), "values": values(types)}, indent=1, sort_keys=True))
