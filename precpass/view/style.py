"""The style sheet of all that is shown as HTML, in light and in dark mode."""

from __future__ import annotations

__all__ = ["CSS"]

_SORTED = "\n".join(
    f".precpass .sheet:has(.s{i}:checked) tbody tr {{ order: var(--s{i}); }}\n"
    f".precpass .sheet th:has(.s{i}:checked) {{ text-decoration: underline; }}"
    for i in range(16)
)
_SHOWN = "\n".join(
    f".precpass .sheet:has(input.g{i}:checked) tbody tr:not(.g{i}) {{ display: none; }}"
    for i in range(8)
)

CSS = (
    """
.precpass { font-family: ui-monospace, monospace; font-size: 13px; line-height: 1.45;
max-width: 1200px; --low: #2f9e6e; --wide: #e08c00; --bad: #ca244d; --mid: #4c8fe0;
--none: #a8aab4; --rule: #d5d7de; --tint: #4c8fe02e; }
.precpass pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.precpass svg { max-width: 100%; height: auto; }
.precpass .where { font-weight: bold; } .precpass .code { font-style: italic; }
.precpass .low, .precpass .added { color: #18794e; } .precpass .wide { color: #945700; }
.precpass .cast, .precpass .hunk { color: #0b68cb; }
.precpass .removed, .precpass .bad { color: #ca244d; }
.precpass .reason { opacity: 0.7; } .precpass .frame { color: #8e4ec6; font-weight: bold; }
.precpass b { font-weight: 600; } .precpass .bf16, .precpass .f16 { color: #18794e; }
.precpass .f32 { color: #945700; } .precpass .f64 { color: #ca244d; }
.precpass summary { cursor: pointer; } .precpass details > details, .precpass details > pre,
.precpass details > table { margin-left: 1.4em; }
.precpass table { font-size: inherit; }
.precpass td, .precpass th { text-align: left; padding: 1px 10px 1px 0; }
.precpass .head { font-weight: bold; margin-bottom: 6px; }
.precpass .bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; }
.precpass .fill { display: block; min-width: 2px; }
.precpass .dot { display: inline-block; width: 9px; height: 9px; border-radius: 2px;
margin-right: 5px; }
.precpass i.low { background: var(--low); } .precpass i.wide { background: var(--wide); }
.precpass i.bad { background: var(--bad); } .precpass i.cast { background: var(--mid); }
.precpass i.none { background: var(--none); }
.precpass .keys, .precpass .facts { display: flex; flex-wrap: wrap; gap: 2px 16px;
margin: 4px 0; }
.precpass .facts > span { border: 1px solid var(--rule); border-radius: 4px; padding: 0 7px; }
.precpass .facts { gap: 5px 6px; }
.precpass .sheet { margin: 8px 0; }
.precpass .sheet table { display: grid; width: 100%; font-size: 12px; margin: 0;
border-collapse: collapse; max-width: 100%; overflow-x: auto; }
.precpass .sheet thead, .precpass .sheet tbody { display: contents; }
.precpass .sheet tr { display: grid; grid-column: 1 / -1; grid-template-columns: subgrid;
border-bottom: 1px solid var(--rule); background: none; }
.precpass .sheet .title { padding: 6px 0 4px; }
.precpass .sheet thead tr { order: -1; }
.precpass .sheet th, .precpass .sheet td { padding: 2px 6px 3px 4px; overflow-wrap: anywhere;
text-align: left; vertical-align: top; white-space: normal; }
.precpass .sheet .figure { text-align: right; overflow-wrap: normal; }
.precpass .sheet td.figure span { white-space: nowrap; }
.precpass .sheet td.part { background: linear-gradient(to left, var(--mid) var(--part),
transparent var(--part)) bottom / 100% 3px no-repeat; }
.precpass .sheet label { cursor: pointer; }
.precpass .sheet input { position: absolute; opacity: 0; pointer-events: none; }
.precpass .sheet label:has(:focus-visible) { outline: 2px solid var(--mid); }
.precpass .filters { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 6px; }
.precpass .filters label { border: 1px solid var(--rule); border-radius: 9px; padding: 0 9px; }
.precpass .filters label:has(:checked) { background: var(--tint); border-color: var(--mid); }
"""
    + _SORTED
    + "\n"
    + _SHOWN
    + """
@media (prefers-color-scheme: dark) {
.precpass { --low: #33b074; --wide: #d9900f; --bad: #e5484d; --mid: #4c8fe0; --none: #62646e;
--rule: #3b3d45; --tint: #4c8fe04d; }
.precpass .bf16, .precpass .f16 { color: #3dd68c; } .precpass .f32 { color: #ffca16; }
.precpass .f64 { color: #ff9592; }
.precpass .low, .precpass .added { color: #3dd68c; } .precpass .wide { color: #ffca16; }
.precpass .cast, .precpass .hunk { color: #70b8ff; }
.precpass .removed, .precpass .bad { color: #ff9592; }
.precpass .frame { color: #d19dff; } }
"""
)
