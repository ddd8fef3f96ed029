"""Upload to the Hugging Face hub, with the token that ``hf auth login`` or ``HF_TOKEN`` has left."""

from __future__ import annotations

from pathlib import Path

from fastdiff.errors import ConfigError, StorageError


def check_repo_id(repo_id: str) -> None:
    """Refuse what is no name of a repository.

    Raises:
        ConfigError: says what is wrong with it.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repo_id}: {' '.join(str(error).split())}") from None


def push(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a folder to a model repository, which is made if there is none, and return its address.

    Args:
        folder: of the export.
        repo_id: ``user/name``.
        private: make a private repository; else one as is usual for its owner. One that is there stays as it is.

    Raises:
        StorageError: the hub cannot be reached, or refuses; the folder is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by its version

    api = HfApi(library_name="fastdiff")
    try:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Export of fastdiff")
    except (HTTPError, OSError, ValueError) as error:
        raise StorageError(
            f"{folder} is written, but not uploaded to {repo_id}: {' '.join(str(error).split())}; see that the hub can "
            f"be reached and that you are logged in (`hf auth login`), then: hf upload {repo_id} {folder} ."
        ) from None
    return str(address)
