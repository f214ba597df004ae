"""A home folder for users that have none.

OpenShift runs containers with a random user id that no `/etc/passwd` has, and without `HOME`. Caches of
segue and of the libraries below it are in the home folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from segue.kv import ConfigError


def make_home() -> None:
    """Set `HOME`, also for child processes, to a private folder in that for temporary files, unless the user
    has a home folder. Raises ConfigError if there can be none."""
    if os.path.expanduser("~") != "~":
        return
    from segue.server.supervisor.local_deployments import check_private

    place = Path(tempfile.gettempdir()) / f"segue-{os.getuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        check_private(place, "HOME")
    except OSError as error:
        raise ConfigError(
            f"this user has no home folder (HOME is not set), and {place} cannot be one: {error.strerror}; "
            "set HOME, or TMPDIR"
        ) from error
    os.environ["HOME"] = str(place)
