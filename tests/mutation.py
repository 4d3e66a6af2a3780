"""Mutants of a file: the same file with one small mistake, made by rewriting its syntax tree.

Each mutant is one of the mistakes that programmers make: a comparison or a boundary that is off by one, an operator
that is another one, a statement, a condition or a part of a sum that is left out, an argument in another's place, a
list that is reversed, a loop that ends too early or goes on too long. What states a fact and computes nothing has no
mutants: assertions, docstrings, decorators, `strict` of `zip`.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
}
_KEPT = (ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assert)
"""Statements that are not left out."""
_FURTHER, _BACKWARDS = ast.Slice(ast.Constant(1)), ast.Slice(step=ast.UnaryOp(ast.USub(), ast.Constant(1)))
Edit = Callable[[ast.AST], None]


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the changed source), each once, in the order of the file."""
    seen = {ast.unparse(ast.parse(source))}
    for change in changes(source):
        text = ast.unparse(change.made_in(source))
        if text not in seen:
            seen.add(text)
            yield f"line {change.line}: {change.what}", text + "\n"


class Change(NamedTuple):
    """One mistake. Two of them may come to the same source."""

    line: int
    what: str
    place: int
    """Of the node, in the order in which the tree is walked."""
    edit: Edit

    def made_in(self, source: str) -> ast.Module:
        tree = ast.parse(source)
        self.edit(next(islice(ast.walk(tree), self.place, None)))
        return ast.fix_missing_locations(tree)


def changes(source: str) -> Iterator[Change]:
    """Every mistake that can be made in the source, in the order of its tree."""
    tree = ast.parse(source)
    silent = {part for node in ast.walk(tree) for fact in _facts_of(node) for part in ast.walk(fact)}
    for place, node in enumerate(ast.walk(tree)):
        if node not in silent:
            for what, edit in _edits(node):
                yield Change(getattr(node, "lineno", 0), what, place, edit)


def _facts_of(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Assert() | ast.keyword(arg="strict"):
            yield node
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.decorator_list


def _edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare(ops=[operator]):
            for other in _COMPARISONS[type(operator)]:
                yield f"{_named(operator)} is {_named(other())}", _set("ops", [other()])
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            for other in _OPERATORS[type(operator)]:
                yield f"{_named(operator)} is {_named(other())}", _set("op", other())
            yield "without the right side", _become("left")
        case ast.AugAssign(op=operator) if type(operator) in _OPERATORS:
            for other in _OPERATORS[type(operator)]:
                yield f"{_named(operator)}= is {_named(other())}=", _set("op", other())
        case ast.BoolOp(op=operator):
            other = ast.And() if isinstance(operator, ast.Or) else ast.Or()
            yield f"{_named(operator)} is {_named(other)}", _set("op", other)
            for index in range(len(node.values)):
                yield f"without operand {index}", _without_operand(index)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "without its sign", _become("operand")
        case ast.Constant(value=bool()):
            yield "the other truth", _set("value", not node.value)
        case ast.Constant(value=int()):
            for other in (node.value + 1, node.value - 1):
                yield f"{node.value} is {other}", _set("value", other)
        case ast.If() | ast.IfExp() | ast.While():
            for truth in (True, False) if not isinstance(node, ast.While) else (False,):
                yield f"the condition is {truth}", _set("test", ast.Constant(truth))
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield f"{name} is the other", _set("func", _name("max" if name == "min" else "min"))
        case ast.Call(args=[first, second, *_]) if ast.unparse(first) != ast.unparse(second):
            yield "arguments exchanged", _exchange("args")
        case ast.For():
            yield "only the first time", _append("body", ast.Break())
            yield "not the first time", _set("iter", _part_of(node.iter, _FURTHER))
            yield "reversed", _set("iter", _part_of(node.iter, _BACKWARDS))
        case ast.Continue():
            yield "break", _replaced(ast.Break())
        case ast.Break():
            yield "continue", _replaced(ast.Continue())
    for name in ("body", "orelse"):
        statements = getattr(node, name, None)
        if isinstance(statements, list) and not isinstance(node, ast.Module | ast.ClassDef):
            for index, statement in enumerate(statements):
                if not isinstance(
                    statement, ast.Pass | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assert
                ) and (not _is_docstring(statement)):
                    yield f"without {ast.unparse(statement).splitlines()[0][:60]!r}", _drop(name, index)


def _is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _named(operator: ast.AST) -> str:
    return type(operator).__name__


def _set(name: str, value: object) -> Edit:
    return lambda node: setattr(node, name, copy.deepcopy(value))


def _drop(name: str, index: int) -> Edit:
    def edit(node: ast.AST) -> None:
        items = getattr(node, name)
        del items[index]
        if not items and name == "body":
            items.append(ast.Pass())

    return edit


def _append(name: str, statement: ast.stmt) -> Edit:
    return lambda node: getattr(node, name).append(statement)


def _exchange(name: str) -> Edit:
    def edit(node: ast.AST) -> None:
        items = getattr(node, name)
        items[0], items[1] = items[1], items[0]

    return edit


def _become(name: str) -> Edit:
    """The node is replaced by one of its parts."""
    return lambda node: _turn_into(node, getattr(node, name))


def _without_operand(index: int) -> Edit:
    """One of two operands leaves the other alone."""

    def edit(node: ast.AST) -> None:
        assert isinstance(node, ast.BoolOp)
        del node.values[index]
        if len(node.values) == 1:
            _turn_into(node, node.values[0])

    return edit


def _turn_into(node: ast.AST, part: ast.AST) -> None:
    node.__class__ = part.__class__
    node.__dict__ = dict(part.__dict__)


def _replaced(other: ast.AST) -> Edit:
    def edit(node: ast.AST) -> None:
        node.__class__ = other.__class__

    return edit


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _part_of(value: ast.expr, part: ast.Slice) -> ast.expr:
    return ast.Subscript(ast.Call(_name("list"), [value], []), part, ast.Load())
