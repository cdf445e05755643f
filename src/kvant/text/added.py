"""Merge the added and special tokens of a folder's files as transformers 5 does."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

from kvant.text.folder import TOKEN_KEYS

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")  # the current name, and the previous one
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

    Args:
        rebuilt: whether the tokenizer starts without ``present``.
        defaults: tokens by role, used if no file names one.

    Returns:
        Tokens by role, including the model's own roles (``image_token``); special tokens without a role; and
        the tokens to add to the tokenizer, in order.
    """
    settings = dict(config)
    if not settings.get(LISTS[0]) and LISTS[1] in settings:
        settings[LISTS[0]] = settings.pop(LISTS[1])
    by_model = {
        name: settings.pop(name)
        for name in list(settings)
        if _is_named_by_model(name) and isinstance(settings[name], str)
    }
    if isinstance(settings.get(LISTS[0]), dict):
        by_model |= settings.pop(LISTS[0])
    listed = settings.get("added_tokens_decoder")
    if listed is not None:
        by_id = {int(key): token(value) for key, value in listed.items()}
        known = {added.content: added for added in by_id.values()}
    else:
        _merge_special_tokens_map(settings, by_model, special_tokens)
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
            token_or_text = _as_token(value)
            roles[name] = known.get(str(token_or_text), token_or_text) if name in settings else token_or_text
    usual = {name: value for name, value in defaults.items() if _is_named_by_model(name)}
    others = usual | {name: value for name, value in settings.items() if _is_named_by_model(name)} | by_model
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
    """Make a token from its description in a file."""
    return AddedToken(**{key: item for key, item in value.items() if key in TOKEN_KEYS})


def _merge_special_tokens_map(
    settings: dict[str, Any], by_model: dict[str, Any], special_tokens: Mapping[str, Any]
) -> None:
    """In older folders special_tokens_map.json overrides tokenizer_config.json."""
    for name, value in special_tokens.items():
        if name != LISTS[0]:
            settings[name] = _as_token(value, special=True)
        elif isinstance(value, dict):
            by_model |= value
        else:
            merged = list(settings.get(name) or ())
            for item in value or ():
                more = _as_token(item, special=True)
                merged += [more] if more not in merged else []
            settings[name] = merged


def _missing(
    present: Iterable[AddedToken], listed: list[AddedToken], roles: Mapping[str, Token], extra: list[Token]
) -> list[AddedToken]:
    """Return tokens that files describe or the tokenizer lacks; those with a role become special."""
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
