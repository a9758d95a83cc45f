"""Tiny random models of many architectures, built from their configurations: nothing is fetched."""

import torch
import transformers as hf

# name: (model class, config class, settings, what it takes: "text", "pixels", "pair" of texts, "speech")
SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 53,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "hidden_size": 32, "pad_token_id": 0}
SEQ2SEQ = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 53,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = {**SMALL, "image_size": 12, "patch_size": 4}
IMAGE.pop("vocab_size")
T5 = {
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 53,
    "decoder_start_token_id": 0,
}

ARCHITECTURES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, GROUPED, "text"),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**GROUPED, "sliding_window": 4}, "text"),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**GROUPED, "num_local_experts": 2}, "text"),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, GROUPED, "text"),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**GROUPED, "head_dim": 8}, "text"),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**GROUPED, "head_dim": 8}, "text"),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**GROUPED, "head_dim": 8, "sliding_window": 4}, "text"),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, GROUPED, "text"),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**GROUPED, "eos_token_id": 2, "bos_token_id": 1}, "text"),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, GROUPED, "text"),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, {**GROUPED, "eos_token_id": 2, "bos_token_id": 1}, "text"),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, GROUPED, "text"),
    "starcoder2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config, {**GROUPED, "sliding_window": 4}, "text"),
    "stablelm": (hf.StableLmForCausalLM, hf.StableLmConfig, GROUPED, "text"),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
        "text",
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 53}, "text"),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, SMALL, "text"),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 24, "pad_token_id": 0},
        "text",
    ),
    "bert": (hf.BertModel, hf.BertConfig, SMALL, "text"),
    "roberta": (hf.RobertaModel, hf.RobertaConfig, {**SMALL, "pad_token_id": 0}, "text"),
    "electra": (hf.ElectraModel, hf.ElectraConfig, {**SMALL, "embedding_size": 24}, "text"),
    "distilbert": (
        hf.DistilBertModel,
        hf.DistilBertConfig,
        {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 53},
        "text",
    ),
    "albert": (hf.AlbertModel, hf.AlbertConfig, {**SMALL, "embedding_size": 24}, "text"),
    "modernbert": (
        hf.ModernBertModel,
        hf.ModernBertConfig,
        {**SMALL, "local_attention": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
        "text",
    ),
    "vit": (hf.ViTModel, hf.ViTConfig, IMAGE, "pixels"),
    "dinov2": (hf.Dinov2Model, hf.Dinov2Config, IMAGE, "pixels"),
    "siglip": (hf.SiglipVisionModel, hf.SiglipVisionConfig, IMAGE, "pixels"),
    "clip_vision": (hf.CLIPVisionModel, hf.CLIPVisionConfig, IMAGE, "pixels"),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, SEQ2SEQ, "pair"),
    "marian": (hf.MarianMTModel, hf.MarianConfig, SEQ2SEQ, "pair"),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, T5, "pair"),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20},
        "speech",
    ),
}


def build(name, attention):
    """A model in eval mode and inputs for it."""
    model_class, config_class, settings, takes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = config_class(**settings)
    config._attn_implementation = attention
    model = model_class(config).eval()
    # Attention far from uniform, so that a mistake shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 53, (2, 11), generator=generator)
    if takes == "text":
        return model, {"input_ids": ids}
    if takes == "pixels":
        return model, {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    if takes == "pair":
        return model, {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return model, {"input_features": torch.randn(2, 8, 20, generator=generator), "decoder_input_ids": ids[:, :7]}
