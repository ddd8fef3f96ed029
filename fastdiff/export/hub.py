"""Upload to the Hugging Face hub, with the token of ``hf auth login`` or ``HF_TOKEN``."""

from pathlib import Path

from fastdiff.errors import ConfigError, StorageError


def check_repo_id(repo_id: str) -> None:
    """Raise ConfigError, with the reason, if the name of a repository is invalid."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repo_id}: {' '.join(str(error).split())}") from None


def push(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a folder to a model repository, creating it if missing, and return its address.

    Args:
        folder: of the export.
        repo_id: ``user/name``.
        private: create a private repository; otherwise its owner's default. An existing one stays as it is.

    Raises:
        StorageError: the hub is unreachable or refuses; the folder is unchanged.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by its version

    api = HfApi(library_name="fastdiff")
    try:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Export of fastdiff")
    except (HTTPError, OSError, ValueError) as error:
        raise StorageError(
            f"{folder} is written, but not uploaded to {repo_id}: {' '.join(str(error).split())}; check that the hub "
            f"can be reached and that you are logged in (`hf auth login`), then: hf upload {repo_id} {folder} ."
        ) from None
    return str(address)
