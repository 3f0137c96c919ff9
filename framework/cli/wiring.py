"""`workerkit wiring`: who gets whom, as text or as a page with a picture."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workerkit.framework.assembly import Assembly
from workerkit.framework.cli import common
from workerkit.framework.cli.picture import page
from workerkit.framework.errors import WorkerkitError
from workerkit.framework.plan import Node, Wire
from workerkit.framework.roles import KERNELS


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(group, "wiring", _wiring, "show which part receives which, and why it was chosen")
    common.add_file(parser)
    parser.add_argument("--html", metavar="OUT", help="write a page with a picture in place of the text")
    parser.add_argument("--open", action="store_true", help="open the page in a browser (with --html)")


def _wiring(args: argparse.Namespace) -> int:
    if args.open and not args.html:
        raise WorkerkitError("--open needs --html OUT")
    assembly = common.assembly_of(args)
    bindings = _kernel_bindings(assembly)
    if args.html is None:
        print("\n".join(_text(assembly, bindings)))
        return 0
    out = Path(args.html)
    try:
        out.write_text(page(assembly.plan, bindings, title=args.config), encoding="utf-8")
    except OSError as error:
        raise WorkerkitError(f"cannot write {out}: {error}") from error
    print(out)
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0


def _kernel_bindings(assembly: Assembly) -> Mapping[str, str]:
    """Op -> library; built without a device. When that fails, `?` -> why."""
    if KERNELS.name not in assembly.plan.nodes:
        return {}
    try:
        return assembly.get(KERNELS).bindings
    except Exception as error:  # a library may need what is not here; the wiring is shown all the same
        return {"?": f"cannot be bound here: {type(error).__name__}: {error}"}


def _text(assembly: Assembly, bindings: Mapping[str, str]) -> Iterator[str]:
    for node in assembly.plan.nodes.values():
        yield _heading(node)
        yield from common.columns([(name, f"<- {what}") for name, what in _sources(node.wires)], indent="    ")
    for name in assembly.plan.published:
        yield f"{name}: comes to life when the worker lays out its KV cache"
    if bindings:
        yield ""
        yield "kernels, op by op"
        yield from common.columns([(op, library) for op, library in bindings.items()], indent="    ")


def _heading(node: Node) -> str:
    """`sampler: torch (TorchSampler) - default`."""
    made_by = getattr(node.factory, "__qualname__", str(node.factory))
    if node.role is None:
        return f"{node.key}: made by {made_by}"
    return f"{node.key}: {node.name} ({made_by})  {node.why or 'named by the config'}"


def _sources(wires: Mapping[str, Wire]) -> Iterator[tuple[str, str]]:
    """Each parameter, and each field of a bundle, with what it receives."""
    for name, wire in wires.items():
        if wire.bundle is not None and wire.bundle_class is not None:
            yield name, f"a {wire.bundle_class.__name__} of"
            yield from ((f"  .{field}", what) for field, what in _sources(wire.bundle))
        elif wire.special is not None:
            yield name, f"the worker's {wire.special.__name__}"
        elif wire.many:
            yield name, f"[{', '.join(wire.keys)}]"
        elif wire.keys:
            yield name, f"{wire.keys[0]}, built when first asked for" if wire.later else wire.keys[0]
        else:
            yield name, f"section {type(wire.value).__name__}"
