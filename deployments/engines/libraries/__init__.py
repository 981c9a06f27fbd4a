"""Files and classes of diffusers and transformers: configs, tokenizers, chat templates, private names."""
