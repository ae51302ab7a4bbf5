"""Command options made from configuration dataclasses.

A field whose metadata has a "help" text is an option: its name, type, default and help stand in the dataclass alone. A
text may end in "(default: ...)", for a default that is no value. Metadata may also name a "panel" of the help page and
another "flag" than the field's name.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

Command = Callable[..., None]


def options_from(
    config: type,
    *,
    without: Collection[str] = (),
    optional: Collection[str] = (),
    helps: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Decorates a command, whose first parameter becomes a dict of the fields that the user gave, by name.

    Its other parameters are ordinary options; they take precedence over fields of the same name. A field with a tuple
    of texts is written with commas.

    Args:
        config: the dataclass.
        without: fields that are no options of this command.
        optional: fields without default that need not be given.
        helps: help texts in place of the fields' own.
    """

    def decorate(command: Command) -> Command:
        _, *local = signature(command, eval_str=True).parameters.values()
        hints, taken = get_type_hints(config), {*without, *(parameter.name for parameter in local)}
        chosen = {one.name: one for one in fields(config) if "help" in one.metadata and one.name not in taken}
        texts = {name: one.metadata["help"] for name, one in chosen.items()} | dict(helps or {})
        options = [_option(one, hints[name], texts[name], name in optional) for name, one in chosen.items()]

        @functools.wraps(command)
        def wrapper(ctx: typer.Context, **values: Any) -> None:
            given = {name: values.pop(name) for name in chosen}
            given = {name: value for name, value in given.items() if _is_given(ctx, name)}
            for name in given:
                if isinstance(chosen[name].default, tuple):
                    given[name] = tuple(word.strip() for word in given[name].split(","))
            command(given, **values)

        context = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        every = [context, *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*local, *options))]
        wrapper.__signature__ = Signature(every)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in every}
        return wrapper

    return decorate


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
