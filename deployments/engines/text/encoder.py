"""One text encoder: strings -> token ids -> embeddings, or a classifier's logits, many texts in few forwards.

The two halves are apart because token ids are the keys of an embedding cache.

It is built from a folder in a stock layout and its tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoTokenizer

from configs.model import TextPadding
from configs.options import PromptSyntax
from deployments.engines.building.build import IMPORT_LOCK, build_module
from deployments.engines.costs.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.embedding_rules import Prompts, check_dimensions, read_prompts
from deployments.engines.libraries.tokenizer_files import check_tokenizer, check_tokenizer_files
from deployments.engines.native.library import load_kernels
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.few_rows import are_kernels_faster
from deployments.engines.nn.learned_rows import reading_rows
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import (
    PENULTIMATE,
    ClipLayer,
    EngineError,
    PromptForm,
    check_choice,
)
from deployments.engines.text.forward_plan import DEFAULT_LIMITS, EncodeCounter, ForwardLimits, plan_forwards
from deployments.engines.text.forwards import (
    FAMILIES,
    encoder_family_of,
    filler_id,
    has_bert_layers,
    limits_of,
    run_layers,
    text_kind,
)
from deployments.engines.text.known import ScoringRule, encoder_class, read_scoring_rule
from deployments.engines.text.outputs import TextOutputs
from deployments.engines.text.sentence_layers import Pooling, load_pooling, scores_of
from deployments.engines.text.tokens import LearnedWords, TextPair, TextTokenizer, TokenizedText
from weights.formats.classifier import SUFFIX
from weights.formats.encoder_files import SentenceStage
from weights.platform.panics import panics_as_errors


class TextEncoder:
    """A CLIP, CLIP-with-projection, T5 or BERT-family encoder or classifier, or a language model, and its tokenizer.

    `encode` belongs to one thread at a time; everything else may be called from any.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        *,
        max_tokens: int | None = None,
        pooling: Pooling | None = None,
        scoring: ScoringRule | None = None,
        prompts: Prompts = Prompts(),  # noqa: B008  # it never changes
    ) -> None:
        """`max_tokens` limits every text (None: the limit of tokenizer and model). `pooling` makes one vector of a T5's
        or BERT's many; a T5 without one gives no embedding. `scoring` is that of a classifier. `prompts` stand before
        texts to embed.
        """
        self.module = module
        self._family = encoder_family_of(type(module).__name__)
        self._pooling = pooling
        self.scoring = scoring
        self.prompts = prompts
        has_types = self._family.is_classifier and _takes_types(module)
        self._tokenizer = TextTokenizer(tokenizer, max_tokens, position_limit(module), has_types=has_types)
        self._outputs = TextOutputs(type(module).__name__, self._family, pooling, self._tokenizer)
        self._memory = MemoryLimits()
        self.lock = threading.Lock()  # of the module: hooks on it change every forward meanwhile
        self._filler = filler_id(self._family, module.config, self._tokenizer.pad_id)
        self._vocabulary_size = module.get_input_embeddings().num_embeddings  # type: ignore[operator]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the outputs."""
        return next(self.module.parameters()).dtype

    @property
    def image_token_id(self) -> int:
        """Return the id of the image token. Raises EngineError for an encoder that sees no images."""
        found = getattr(self.module.config, "image_token_id", None)
        if not isinstance(found, int):
            raise EngineError(f"a {type(self.module).__name__} sees no images")
        return found

    @property
    def max_tokens(self) -> int:
        """Return the default limit of a text."""
        return self._tokenizer.max_tokens

    @property
    def later_stages(self) -> tuple[SentenceStage, ...]:
        """Return the stages after the pooling, which turn `encode`'s outputs into embeddings elsewhere."""
        return self._pooling.later if self._pooling else ()

    def check_embeds(self) -> None:
        """Raise EngineError when a text gives no single vector."""
        self._outputs.check_embeds()

    def shortened(self, vector_D: torch.Tensor, dimensions: int) -> torch.Tensor:
        """Return the first `dimensions` of an embedding, scaled to length 1; all of them as they are.

        Raises EngineError for a model not trained for it: part of its vector has no meaning.
        """
        check_dimensions(dimensions, len(vector_D), self.module.config)
        if dimensions == len(vector_D):
            return vector_D
        return torch.nn.functional.normalize(vector_D[:dimensions].float(), dim=0)

    def scored(self, logits_C: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        """Return the scores of a text's logits, or the logits. Raises EngineError unless this is a classifier."""
        if self.scoring is None:
            raise EngineError(f"a {type(self.module).__name__} scores nothing")
        return logits_C if raw else scores_of(logits_C, self.scoring)

    def variant(self, text: TokenizedText) -> str:
        """Return the name that distinguishes encodings of the same weights and ids: padding, layer, or pooling."""
        return self._outputs.variant(text)

    def tokenize(
        self,
        texts: Sequence[str | TextPair],
        max_length: int | None = None,
        *,
        padding: TextPadding = "stock",
        as_embedding: bool = False,
        layer: ClipLayer = PENULTIMATE,
        form: PromptForm | None = None,
        images: tuple[PromptImage, ...] = (),
        max_second: int | None = None,
    ) -> list[TokenizedText]:
        """Return token ids per text, cut to `max_length` (None: the model's limit), with the number of cut tokens.

        "stock" pads as diffusers' pipelines do: CLIP and T5 attend to padding up to `max_length`. "trimmed", and every
        embedding, has the tokens alone. A language model reads texts in a `form`, which defines the padding, and sees
        `images` in each of them; their tokens do not count.
        """
        check_choice("padding", padding, TextPadding)
        if form is not None:
            return self._tokenize_prompts(texts, max_length, form, images)
        found = self._tokenizer.tokenize(texts, max_length, max_second)
        return [
            replace(self._outputs.as_asked(text, max_length, padding, as_embedding=as_embedding), layer=layer)
            for text in found
        ]

    def _tokenize_prompts(
        self,
        texts: Sequence[str | TextPair],
        max_length: int | None,
        form: PromptForm,
        images: tuple[PromptImage, ...],
    ) -> list[TokenizedText]:
        padded_length = self._tokenizer.check_length(max_length) if form.keeps_padding else None
        filled = [self._tokenizer.fill_form(str(text), form, images) for text in texts]
        num_rows = sum(image.num_rows for image in images)
        found = self._tokenizer.tokenize(filled, None if max_length is None else max_length + num_rows)
        for text in found if images else ():
            count = text.token_ids.count(self.image_token_id)
            if count != num_rows:
                raise EngineError(f"the prompt has {count - num_rows} tokens that stand for images: it may have none")
        return [replace(text, form=form, images=images, padded_length=padded_length) for text in found]

    def learn_words(self, vectors: Mapping[str, torch.Tensor], identity: str) -> LearnedWords | None:
        """Return words with their vectors (N, D), which texts may then contain; None for an encoder that takes none.

        Raises EngineError for vectors of another size than this encoder's.
        """
        if not (self._family.is_clip and vectors):
            return None
        width = self.module.get_input_embeddings().embedding_dim  # type: ignore[operator]
        ids: dict[str, range] = {}
        begin = self._vocabulary_size
        for word, rows in vectors.items():
            if rows.shape[1] != width:
                raise EngineError(
                    f"{word!r} has vectors of {rows.shape[1]} numbers, and this text encoder reads {width}: it is for "
                    "another model"
                )
            ids[word] = range(begin, begin := begin + len(rows))
        table = torch.cat([rows.float() for rows in vectors.values()])
        return LearnedWords(ids, table, identity, ignores_case=self._tokenizer.ignores_case)

    def tokenize_words(
        self, text: str, max_length: int | None, words: LearnedWords, *, layer: ClipLayer = PENULTIMATE
    ) -> TokenizedText:
        """Return the token ids of a text with learned words, as `tokenize` does for others."""
        found = self._tokenizer.tokenize_words(text, max_length, words)
        return replace(self._outputs.as_asked(found, max_length, "stock", as_embedding=False), layer=layer)

    def tokenize_chunks(
        self,
        text: str,
        max_length: int | None = None,
        *,
        layer: ClipLayer = PENULTIMATE,
        syntax: PromptSyntax = "plain",
        words: LearnedWords | None = None,
    ) -> list[TokenizedText]:
        """Cut the whole text into padded pieces, as `TextTokenizer.chunk`. Raises EngineError if this is no CLIP."""
        if not self._family.is_clip:  # readers of CLIP's output take any number of pieces
            raise EngineError(
                f"long_text 'chunk': a {type(self.module).__name__} takes a text in one piece; use truncate or error"
            )
        if syntax == "comfyui":
            found = self._tokenizer.chunk_comfyui(text, max_length)
        else:
            cut = self._tokenizer.chunk if syntax == "plain" else self._tokenizer.chunk_weighted
            found = cut(text, max_length, words)
        return [
            replace(self._outputs.as_asked(piece, max_length, "stock", as_embedding=False), layer=layer)
            for piece in found
        ]

    def accept_ids(self, ids: Sequence[int]) -> TokenizedText:
        """Accept the caller's own ids for an embedding. Raises EngineError for ids that the model cannot take."""
        text = TokenizedText(tuple(ids), as_embedding=True)
        self._check(text)
        return text

    def encode(self, texts: Sequence[TokenizedText]) -> list[dict[str, torch.Tensor]]:
        """Return the embeddings of each text, without batch axis, in few forwards.

        CLIP gives "pooled" (P,), with projection the projected one, and the text's layer (L, D): "hidden" if the
        final norm follows, else "penultimate". T5 gives "hidden" (L, D); sentence encoders, and all for `as_embedding`,
        "embedding" (D,), which of a classifier is its logits. L is the text's own `run_length`. Raises EngineError for
        ids that the model cannot take, ComputationFailed for numbers that are not finite.
        """
        for text in texts:
            self._check(text)
        outcomes = self.encode_each(texts)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def encode_each(
        self,
        texts: Sequence[TokenizedText],
        *,
        limits: ForwardLimits = DEFAULT_LIMITS,
        counter: EncodeCounter | None = None,
        words: LearnedWords | None = None,
        workspace: Workspace = UNBOUNDED,
    ) -> list[dict[str, torch.Tensor] | Exception]:
        """Encode as `encode` does, with an error per text. A forward has as many texts as the `workspace` has room for.

        Ids after those of the vocabulary are those of `words`. Texts of a failed forward run again one by one;
        one without enough memory becomes smaller ones, and so do the next.
        """
        outcomes: dict[int, dict[str, torch.Tensor] | Exception] = {}
        for index, text in enumerate(texts):
            try:
                self._check(text, len(words.vectors) if words else 0)
            except EngineError as error:
                outcomes[index] = error
        sound = [index for index in range(len(texts)) if index not in outcomes]
        own_limits = limits_of(self.module, self._family, limits)
        with _read_words(self.module, words):
            alone = [[index] for index in sound if texts[index].images]  # a vision tower has its own memory
            blind = [index for index in sound if not texts[index].images]
            planned = plan_forwards([texts[index].run_length for index in blind], own_limits)
            for places in alone + [[blind[number] for number in group] for group in planned]:
                found = self._run_or_retry([texts[index] for index in places], counter, workspace)
                outcomes |= zip(places, found, strict=True)
        return [outcomes[index] for index in range(len(texts))]

    def _run_or_retry(
        self, texts: list[TokenizedText], counter: EncodeCounter | None, workspace: Workspace
    ) -> list[dict[str, torch.Tensor] | Exception]:
        longest = max(text.run_length for text in texts)
        kind = text_kind(longest, is_padded=all(text.padded_length == longest for text in texts))
        try:
            with panics_as_errors(), workspace.lend(kind, len(texts), len(texts)) as most:
                parts = run_in_parts(
                    lambda start, stop: self._run(texts[start:stop], counter),
                    len(texts),
                    most,
                    self._memory,
                    longest.bit_length(),
                )
            return [outcome for part in parts for outcome in part]
        except Exception as error:
            if len(texts) == 1:
                return [error.with_traceback(None)]  # frames would keep the forward's tensors
        return [self._run_or_retry([text], counter, workspace)[0] for text in texts]

    def _run(
        self, texts: list[TokenizedText], counter: EncodeCounter | None
    ) -> list[dict[str, torch.Tensor] | Exception]:
        lengths = [text.run_length for text in texts]
        longest = max(lengths)
        device = next(self.module.parameters()).device
        rows = [(*self._tokenizer.pad(text), *[self._filler] * (longest - text.run_length)) for text in texts]
        ids_BL = torch.tensor(rows, device=device)
        mask_BL = torch.tensor([self._tokenizer.attended(text, longest) for text in texts], device=device)
        more: dict[str, Any] = {}
        if self._family.is_clip:
            more["layers"] = {text.layer for text in texts}
        if any(text.type_ids for text in texts):
            type_rows = [(*text.type_ids, *[0] * (longest - len(text.type_ids))) for text in texts]
            more["token_type_ids"] = torch.tensor(type_rows, device=device)
        layers = sorted({layer for text in texts if text.form for layer in text.form.layers})
        outputs: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            if layers:
                outputs |= run_layers(self.module, ids_BL, mask_BL, layers, **_seen(texts[0].images, device))
            if any(text.form is None for text in texts):
                outputs |= self._family.run(
                    module=self.module, ids_BL=ids_BL, mask_BL=mask_BL, pooling=self._pooling, **more
                )
        wanted = {source for text in texts for source in self._outputs.sources_of(text).values()}
        # Embeddings are cached and sent to other processes, so they leave the card, whose memory is for weights.
        outputs = {name: output.cpu() for name, output in outputs.items() if name in wanted}
        if counter:
            counter.count_forward([len(text.token_ids) for text in texts], lengths)
        return [self._outputs.of_row(text, row, outputs) for row, text in enumerate(texts)]

    def _check(self, text: TokenizedText, num_learned: int = 0) -> None:
        limit, ids = position_limit(self.module), text.token_ids
        if not ids or (limit is not None and text.run_length > limit):
            raise EngineError(f"a text of {text.run_length} tokens: expected 1 to {limit or 'any number of'} tokens")
        if text.run_length <= text.num_dropped:
            raise EngineError(f"a text of {text.run_length} tokens, of which the first {text.num_dropped} give nothing")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary_size + num_learned:
            raise EngineError(f"token ids {min(ids)} to {max(ids)}: expected 0 to {self._vocabulary_size - 1}")
        if text.as_embedding:
            self.check_embeds()
        config: Any = self.module.config
        if self._family.is_clip and text.layer.num_skipped > config.num_hidden_layers:
            raise EngineError(
                f"clip_skip: {text.layer.num_skipped} layers were to be left out of a text encoder that has "
                f"{config.num_hidden_layers}"
            )


def _seen(images: Sequence[PromptImage], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a vision tower for the images of one text."""
    names = images[0].inputs if images else ()
    return {name: torch.cat([image.inputs[name] for image in images]).to(device) for name in names}


@contextlib.contextmanager
def _read_words(module: nn.Module, words: LearnedWords | None) -> Iterator[None]:
    """Make a module's forwards read `words`' vectors at ids after its vocabulary. Its weights do not change."""
    if words is None:
        yield
        return
    table: Any = module.get_input_embeddings()  # type: ignore[operator]
    with reading_rows(table, table.num_embeddings, words.vectors):
        yield


def _takes_types(module: nn.Module) -> bool:
    """Return whether a classifier takes the number of a token's text in a pair."""
    is_told = "token_type_ids" in inspect.signature(module.forward).parameters
    return is_told and getattr(module.config, "type_vocab_size", 2) > 1


def position_limit(module: nn.Module) -> int | None:
    """Return the longest text that the model has positions for; None for relative positions (T5)."""
    limit = getattr(module.config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    base = getattr(module, "base_model", module)  # below a classifier's head
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding_index = getattr(table, "padding_idx", None)  # RoBERTa counts from the place after it
    return limit if padding_index is None else limit - padding_index - 1


_HAS_OUR_LAYERS: Final = "_atelier_has_our_layers"
OPTIONAL_PARTS = ("pooler",)  # of a BERT: some checkpoints lack it, and no embedding needs it


def load_text_encoder(
    folder: Path,
    library: str,
    class_name: str | None,
    tokenizer_folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    build: Callable[..., nn.Module] = build_module,
    tokenizer: Any = None,
) -> TextEncoder:
    """Return the encoder of `folder` around `tensors` (not copied). `build` makes the module as `build_module`.

    `tokenizer` is that of `tokenizer_folder`, if it was loaded before; it then belongs to this encoder alone.

    Reads the sentence-transformers files if there are any: the pooling of a BERT, or of a T5, which then embeds texts
    beside its token vectors. Raises EngineError naming the folder.
    """
    class_name = encoder_class(folder, class_name)
    module = build(library, class_name, folder, tensors, optional_parts=OPTIONAL_PARTS)
    load_kernels()  # compiled now, if need be, not while the first text waits
    tokenizer = tokenizer or load_tokenizer(tokenizer_folder)
    family = FAMILIES.get(class_name)
    _make_invariant_once(module)
    if family and (family.is_clip or not (folder / "modules.json").exists()):
        return TextEncoder(module, tokenizer)
    sentence_config = folder / "sentence_bert_config.json"
    max_tokens = read_config(sentence_config).get("max_seq_length") if sentence_config.exists() else None
    if class_name.endswith(SUFFIX):
        return TextEncoder(module, tokenizer, max_tokens=max_tokens, scoring=read_scoring_rule(folder))
    return TextEncoder(
        module, tokenizer, max_tokens=max_tokens, pooling=load_pooling(folder), prompts=read_prompts(folder)
    )


def _make_invariant_once(module: nn.Module) -> None:
    """Let the kernels compute a new module's layers: a kept one has such layers, and its attach takes a millisecond."""
    if hasattr(module, _HAS_OUR_LAYERS):
        return
    if are_kernels_faster() and not has_bert_layers(module):  # BERT's forward asks for them by itself
        make_batch_invariant(module)
    setattr(module, _HAS_OUR_LAYERS, True)


def load_tokenizer(folder: Path) -> Any:
    """Load the Hugging Face tokenizer of `folder`. Raises EngineError."""
    check_tokenizer_files(folder)
    try:
        with IMPORT_LOCK, panics_as_errors():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many kinds, by tokenizer class
        check_tokenizer(folder)
        raise EngineError(f"{folder}: no tokenizer can be loaded: {error}") from error
