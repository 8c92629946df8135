"""Render HTML in headless Chromium, in light and in dark, as PNG files to be looked at.

What is given: HTML or SVG files, and notebooks, of which the text and the outputs are shown.
Without any: all that precpass shows as HTML, of a small program.
"""

import argparse
import html
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

WIDTHS = (1000, 1600)
MOST = 16_000
COLORS = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}


def samples() -> Iterator[tuple[str, str]]:
    """The name and the HTML of each kind of value that has one."""
    import jax
    import jax.numpy as jnp

    import precpass as pp

    def model(x, w):
        with jax.named_scope("body"):
            for i in range(2):
                with jax.named_scope(f"layer_{i}"):
                    x = jnp.tanh(x @ w) + x
            x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)
        with jax.named_scope("head"):
            return jax.nn.softmax(jax.lax.dot(x, w, precision="highest")).sum()

    x, w = (jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i in range(2))
    gradient = jax.value_and_grad(model)
    inspection = pp.inspect(gradient)(x, w)
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="*/head", precision="f32"))
    opened = inspection._repr_html_().replace("<details>", '<details open="open">')
    yield "inspection", inspection._repr_html_()
    yield "inspection-opened", opened
    yield "plan", inspection.plan._repr_html_()
    yield "policy", policy._repr_html_()
    yield "explanation", pp.explain(gradient)(x, w)._repr_html_()
    compared = pp.compare(gradient, ["AlwaysF32", "AutoMixedF16", policy], rounds=3)(x, w)
    yield "comparison", compared._repr_html_()

    def reciprocal(x):
        with jax.named_scope("norm"):
            x = x / jnp.abs(x).sum(0)
        return jnp.exp(x.astype(jnp.float16) * 12).sum()

    monitored = pp.monitor(reciprocal)
    healths = [monitored(scale * x)[1] for scale in (1.0, 0.0)]
    yield "health", healths[0].merged(healths[1])._repr_html_()
    # no CPU has a product of float16
    yield "audit", pp.audit(gradient, "AutoMixedF16")(x, w)._repr_html_()


def notebook_page(path: Path) -> str:
    """The cells of a notebook, one below the other: their text, and their outputs' richest form."""
    import nbformat

    parts: list[str] = []
    for cell in nbformat.read(path, as_version=4).cells:
        style = "border-left:3px solid #888;padding-left:8px;" * (cell.cell_type == "code")
        parts.append(f'<pre style="white-space:pre-wrap;{style}">{html.escape(cell.source)}</pre>')
        parts += map(shown, cell.get("outputs", []))
    return "\n".join(parts)


def shown(output: dict) -> str:
    """One output of a cell as HTML."""
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"]
    if "image/svg+xml" in data:
        return data["image/svg+xml"]
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{data["image/png"].strip()}">'
    text = output.get("text") or data.get("text/plain", "")
    return f'<pre style="overflow-x:auto">{html.escape(text)}</pre>'


def pages(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The name and the HTML of each thing to be rendered."""
    if not paths:
        yield from samples()
    for path in paths:
        is_notebook = path.suffix == ".ipynb"
        yield path.stem, notebook_page(path) if is_notebook else path.read_text(encoding="utf-8")


def render(body: str, scheme: str, width: int, target: Path) -> None:
    """Loads a page in Chromium, as high as it is, and writes what is seen."""
    background, color = COLORS[scheme]
    text = (
        f'<!doctype html><meta charset="utf-8"><body style="margin:16px;font-family:sans-serif;'
        f'color-scheme:{scheme};background:{background};color:{color}">{body}</body>'
    )
    source = target.with_suffix(".html")
    source.write_text(text, encoding="utf-8")
    view, loop = QWebEngineView(), QEventLoop()
    view.resize(width, 100)

    def sized(height: float) -> None:
        view.resize(width, min(int(height) + 16, MOST))
        QTimer.singleShot(800, loop.quit)  # the page is painted by another process

    def loaded(ok: bool) -> None:
        if not ok:
            raise SystemExit(f"{target.stem} did not load")
        view.page().runJavaScript("document.documentElement.scrollHeight", sized)

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(str(source.resolve())))
    view.show()
    QTimer.singleShot(30_000, loop.quit)
    loop.exec()
    if not view.grab().save(str(target)):
        raise SystemExit(f"{target} cannot be written")
    view.close()
    source.unlink()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help=".html, .svg or .ipynb")
    parser.add_argument("--out", type=Path, default=Path("screenshots"), help="a folder")
    parser.add_argument("--scheme", choices=COLORS, help="default: both")
    parser.add_argument("--width", type=int, action="append", help="in pixels; default: 1000, 1600")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # Chromium reads these once, when it starts: one process for each scheme
    if options.scheme is None:
        for scheme in COLORS:
            code = os.spawnv(
                os.P_WAIT, sys.executable, [sys.executable, *sys.argv, "--scheme", scheme]
            )
            if code:
                raise SystemExit(code)
        return
    dark = options.scheme == "dark"
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(
        ("--no-sandbox --disable-gpu", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    )
    app = QApplication(sys.argv[:1])
    options.out.mkdir(parents=True, exist_ok=True)
    for name, body in pages(options.files):
        for width in options.width or WIDTHS:
            target = options.out / f"{name}-{options.scheme}-{width}.png"
            render(body, options.scheme, width, target)
            print(target)
    app.quit()


if __name__ == "__main__":
    main()
