"""The causal language models of the pinned transformers, grouped by the way of serving: names alone, free of torch.

`infra/supported/language_models.py` finds them by comparing a tiny model of each class with its own `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Their attention runs over the paged cache.
PAGED: Final = _names(
    """
    AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BeamForCausalLM
    BertGenerationDecoder BertLMHeadModel BitNetForCausalLM CTRLLMHeadModel CamembertForCausalLM Cohere2ForCausalLM
    Cohere2MoeForCausalLM CohereForCausalLM CwmForCausalLM Data2VecTextForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM
    DeepseekV3ForCausalLM DiffLlamaForCausalLM Dots1ForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FlexOlmoForCausalLM
    FlintForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3nForCausalLM Gemma4ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
    Glm4MoeLiteForCausalLM GlmForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HeliumForCausalLM
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM
    JetMoeForCausalLM Kolibri1ForCausalLM LagunaForCausalLM Llama4ForCausalLM LongcatFlashForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM
    MinistralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM NanoChatForCausalLM
    NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2MoeForCausalLM RoCBertForCausalLM
    RobertaForCausalLM RobertaPreLayerNormForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM
    Starcoder2ForCausalLM VaultGemmaForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM XmodForCausalLM
    YoutuForCausalLM
    """
)
# They see images, and their decoder's attention runs over the paged cache.
SEEING: Final = _names(
    """
    Gemma3ForConditionalGeneration Gemma4ForConditionalGeneration GotOcr2ForConditionalGeneration
    Idefics3ForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaOnevisionForConditionalGeneration Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SmolVLMForConditionalGeneration
    """
)
# In these, the tokens of an image see each other: in all layers, or in those with a window if the config says so.
SEES_ITSELF: Final = {"Gemma3ForConditionalGeneration": "everywhere", "Gemma4ForConditionalGeneration": "windows"}
# They read images or sound in unsupported ways: only their decoder is served, as a class of its own.
TEXT_ALONE: Final[Mapping[str, str]] = {
    "FuyuForCausalLM": "PersimmonForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration": "Qwen3ForCausalLM",
    "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
}
# They draft for models of these classes, whose keys and values they read.
DRAFTS_FOR: Final[Mapping[str, str]] = {
    "Gemma4AssistantForCausalLM": "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForConditionalGeneration",
}
# Their attention runs over the paged cache, and their recurrent layers over slots for states of a fixed size.
RECURRENT: Final = _names(
    """
    BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM
    JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Mamba2ForCausalLM MambaForCausalLM
    NemotronHForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    Zamba2ForCausalLM ZambaForCausalLM
    """
)
# They keep their states in a cache of their own for each sequence.
OWN_CACHE: Final = _names(
    """
    AXK2ForCausalLM BartForCausalLM BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM
    BlenderbotForCausalLM BlenderbotSmallForCausalLM BloomForCausalLM CodeGenForCausalLM CohereCompassForCausalLM
    CpmAntForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM DogeForCausalLM Dots3NoteForCausalLM
    FalconForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXJapaneseForCausalLM GlmMoeDsaForCausalLM
    HYV4ForCausalLM Inkling2ForCausalLM InklingForCausalLM Lfm3ForCausalLM MBartForCausalLM MarianForCausalLM
    MegatronBertForCausalLM MiniMaxForCausalLM MptForCausalLM MvpForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM
    PegasusForCausalLM ProphetNetForCausalLM Qwen4ExpForCausalLM RecurrentGemmaForCausalLM RemBertForCausalLM
    RoFormerForCausalLM RwkvForCausalLM StableLmForCausalLM XGLMForCausalLM XLMWithLMHeadModel XLNetLMHeadModel
    ZayaForCausalLM
    """
)
# Of both, they begin anew with each forward of several tokens.
WHOLE_PROMPTS: Final = _names(
    """
    AXK2ForCausalLM CpmAntForCausalLM DeepseekV32ForCausalLM Dots3NoteForCausalLM FalconMambaForCausalLM
    GlmMoeDsaForCausalLM HYV4ForCausalLM JambaForCausalLM MambaForCausalLM ProphetNetForCausalLM
    RecurrentGemmaForCausalLM XLNetLMHeadModel ZambaForCausalLM
    """
)
# Of the last, the modules themselves keep a state in attributes of these names.
IN_MODULES: Final[Mapping[str, tuple[str, ...]]] = {"RecurrentGemmaForCausalLM": ("conv1d_state", "recurrent_states")}
# Encoders, unless their config says `is_decoder`.
MASKED: Final = _names(
    """
    BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM CamembertForCausalLM Data2VecTextForCausalLM
    ElectraForCausalLM ErnieForCausalLM MegatronBertForCausalLM RemBertForCausalLM RoCBertForCausalLM
    RoFormerForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
    XmodForCausalLM
    """
)
# Layers that keep nothing but keys and values.
ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
