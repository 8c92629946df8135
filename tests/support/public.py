"""The names that users import: those of the top level, and those of each submodule."""

from typing import Any

import precpass as pp

SUBMODULES = ("loss_scale", "numerics", "quant", "report", "testing", "types")
NOT_STARRED = ("inspect", "bisect")
"""Names that `import *` leaves out, since Python has modules of these names."""


def public_names() -> dict[str, Any]:
    """Name behind `precpass.` -> what it stands for."""
    found = {name: getattr(pp, name) for name in (*pp.__all__, *NOT_STARRED)}
    for module in SUBMODULES:
        submodule = getattr(pp, module)
        found |= {f"{module}.{name}": getattr(submodule, name) for name in submodule.__all__}
    return found
