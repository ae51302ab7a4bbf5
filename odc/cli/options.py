"""Command options made from configuration dataclasses.

A field whose metadata has a "help" text is an option: its name, type, default and help stand in the dataclass alone. A
text may end in "(default: ...)", for a default that is no value.
Metadata may also name a "panel" of the help page and another "flag" than the field's name.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

Command = Callable[..., None]
_DELAYED = "odc_with_options"  # attribute of a command that does not have its options yet


def options_from(
    *configs: str, without: Collection[str] = (), optional: Collection[str] = (), helps: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Decorates a command, whose first parameter becomes a dict of the fields that the user gave, by name.

    Its other parameters are ordinary options; they take precedence over fields of the same name. A field with a tuple
    of texts is written with commas.

    Args:
        configs: "module:Dataclass", loaded when the command is chosen, since some of them load torch.
        without: fields that are no options of this command.
        optional: fields without default that need not be given.
        helps: help texts in place of the fields' own.
    """

    def decorate(command: Command) -> Command:
        stub = functools.wraps(command)(lambda: None)
        stub.__signature__ = Signature()  # type: ignore[attr-defined]
        stub.__annotations__ = {}
        delayed = functools.partial(_with_options, command, configs, without, optional, helps or {})
        setattr(stub, _DELAYED, delayed)
        return stub

    return decorate


class Commands(TyperGroup):
    """A group that gives a command its options when it is chosen."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class does."""
        name, command, rest = super().resolve_command(ctx, args)
        callback = getattr(command, "callback", None)
        delayed = getattr(getattr(callback, "__wrapped__", callback), _DELAYED, None)
        if delayed is not None:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(name)(delayed())
            command = typer.main.get_command(app)
        return name, command, rest


def _with_options(
    command: Command,
    configs: Collection[str],
    without: Collection[str],
    optional: Collection[str],
    helps: Mapping[str, str],
) -> Command:
    _, *own = signature(command, eval_str=True).parameters.values()
    taken = {*without, *(parameter.name for parameter in own)}
    options: dict[str, Parameter] = {}
    lists: set[str] = set()
    for config in configs:
        module, _, name = config.partition(":")
        cls = getattr(importlib.import_module(module), name)
        hints = get_type_hints(cls)
        for one in fields(cls):
            if "help" in one.metadata and one.name not in taken | options.keys():
                text = helps.get(one.name, one.metadata["help"])
                options[one.name] = _option(one, hints[one.name], text, one.name in optional)
                lists |= {one.name} if isinstance(one.default, tuple) else set()

    @functools.wraps(command)
    def wrapper(ctx: typer.Context, **values: Any) -> None:
        fields_given = {name: value for name, value in values.items() if name in options and _is_given(ctx, name)}
        for name in lists & fields_given.keys():
            fields_given[name] = tuple(word.strip() for word in fields_given[name].split(","))
        command(fields_given, **{name: value for name, value in values.items() if name not in options})

    context = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    every = [context, *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own, *options.values()))]
    wrapper.__signature__ = Signature(every)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in every}
    return wrapper


def _is_given(ctx: typer.Context, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def _option(one: Field[Any], hint: Any, text: str, optional: bool) -> Parameter:
    kind, default = _kind_of(hint), one.default
    if isinstance(default, tuple):
        default = ",".join(default)
    elif default is MISSING:
        default = None if optional else Parameter.empty
    flag = one.metadata.get("flag", f"--{one.name.replace('_', '-')}")
    if default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    text, _, stated = text.removesuffix(")").partition(" (default: ")
    shown: Any = stated or default is not None or ("the demo's, else needed" if optional else "none")
    option = typer.Option(flag, help=text, rich_help_panel=one.metadata.get("panel"), show_default=shown)
    annotation: Any = Annotated[kind | None if default is None else kind, option]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind_of(hint: Any) -> Any:
    """The type on the command line: whether a choice is one is checked by the dataclass, whose message names them."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    return str if get_origin(hint) is tuple else hint
