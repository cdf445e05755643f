"""Find out how kvant was installed, for messages that say how to install an extra."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    If a package came from a folder, a file or a repository, pip records that (PEP 610).
    """
    import json
    import shlex
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        record = json.loads(metadata.distribution("kvant").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        record = {}
    url = record.get("url", "")
    if url.startswith("file:"):
        source = f"{url2pathname(urlsplit(url).path)}[{extra}]"
    elif vcs := record.get("vcs_info"):
        source = f"kvant[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    else:
        source = f"kvant[{extra}]"
    editable = "-e " if record.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(source)}"
