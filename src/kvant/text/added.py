"""Added and special tokens of a folder's files, merged as transformers 5 merges them."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

from kvant.text.folder import TOKEN_KEYS

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")  # today's name, and the one before
Token = str | AddedToken


def folder_tokens(
    present: Mapping[int, AddedToken],
    rebuilt: bool,
    defaults: Mapping[str, str | None],
    config: Mapping[str, Any],
    special_tokens: Mapping[str, Any],
    added_tokens: Mapping[str, int],
) -> tuple[dict[str, str], list[str], list[AddedToken]]:
    """Merge tokenizer.json's added tokens by id, ``present``, with those of the other files.

    ``rebuilt``: the tokenizer begins without them. ``defaults``: tokens by their role, if no file names one.

    Returns tokens by their role, the model's own (``image_token``) too; special ones without a role; and what
    is to be added to the tokenizer, in this order.
    """
    settings = dict(config)
    if not settings.get(LISTS[0]) and LISTS[1] in settings:
        settings[LISTS[0]] = settings.pop(LISTS[1])
    own = {
        name: settings.pop(name)
        for name in list(settings)
        if _is_named_by_model(name) and isinstance(settings[name], str)
    }
    if isinstance(settings.get(LISTS[0]), dict):
        own |= settings.pop(LISTS[0])
    listed = settings.get("added_tokens_decoder")
    if listed is not None:
        by_id = {int(key): token(value) for key, value in listed.items()}
        known = {added.content: added for added in by_id.values()}
    else:
        _take_older(settings, own, special_tokens)
        special = {str(settings[name]) for name in NAMED if settings.get(name)}
        special |= {str(value) for value in settings.get(LISTS[0]) or ()}
        by_id = {
            place: AddedToken(content, normalized=content not in special, special=content in special)
            for content, place in added_tokens.items()
        }
        known = {added.content: added for added in (*by_id.values(), *present.values())}
        by_id |= present
    roles: dict[str, Token] = {}
    for name in NAMED:
        value = settings[name] if name in settings else defaults.get(name)
        if value is not None:
            given = _as_token(value)
            roles[name] = known.get(str(given), given) if name in settings else given
    usual = {name: value for name, value in defaults.items() if _is_named_by_model(name)}
    others = usual | {name: value for name, value in settings.items() if _is_named_by_model(name)} | own
    roles |= {
        name: _as_token(value) for name, value in others.items() if isinstance(value, str | dict | AddedToken)
    }
    if LISTS[0] not in settings:
        settings[LISTS[0]] = [*(settings.get(LISTS[1]) or ()), *usual.values()]
    extra = [
        _as_token(value)
        for value in settings.get(LISTS[0]) or ()
        if isinstance(value, str | dict | AddedToken)
    ]
    adding = _missing(
        [] if rebuilt else present.values(), [by_id[key] for key in sorted(by_id)], roles, extra
    )
    return {name: str(value) for name, value in roles.items()}, [str(value) for value in extra], adding


def token(value: Mapping[str, Any]) -> AddedToken:
    """A token as a file describes it."""
    return AddedToken(**{key: item for key, item in value.items() if key in TOKEN_KEYS})


def _take_older(settings: dict[str, Any], own: dict[str, Any], special_tokens: Mapping[str, Any]) -> None:
    """In an older folder special_tokens_map.json counts before tokenizer_config.json."""
    for name, value in special_tokens.items():
        if name != LISTS[0]:
            settings[name] = _as_token(value, special=True)
        elif isinstance(value, dict):
            own |= value
        else:
            found = list(settings.get(name) or ())
            for item in value or ():
                more = _as_token(item, special=True)
                found += [more] if more not in found else []
            settings[name] = found


def _missing(
    present: Iterable[AddedToken], listed: list[AddedToken], roles: Mapping[str, Token], extra: list[Token]
) -> list[AddedToken]:
    """Tokens the tokenizer lacks, and those the files describe; of them, those with a role become special."""
    missing: list[Token] = [*listed]
    contents = {added.content for added in (*present, *listed)}
    for value in (*roles.values(), *extra):
        if str(value) not in contents and value not in missing:
            missing.append(value)
    named = {str(value) for value in roles.values()}
    adding = []
    for value in missing:
        if isinstance(value, str):
            value = AddedToken(value, special=True)
        elif value.content in named:
            value.special = True
        adding.append(value)
    return adding


def _is_named_by_model(name: str) -> bool:
    return name.endswith("_token") and name not in NAMED


def _as_token(value: str | dict[str, Any] | AddedToken, **more: bool) -> Token:
    return token({**value, **more}) if isinstance(value, dict) else value
