"""The command line as a frozen record, and what follows from it without looking at any file."""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings import EngineSettings


@dataclass(frozen=True)
class CommandOptions:
    """One field an option of `engine.generate`, under the same name. None: not given."""

    model: str
    load_format: str
    prompts: tuple[str, ...]
    input_path: str | None
    prompt_field: str
    system: str | None
    is_chat: bool | None
    limit: int | None
    dry_run: bool
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop_str: bool
    keep_special_tokens: bool
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: tuple[tuple[int, float], ...]
    no_generation_config: bool
    device: str
    dtype: str
    tp: int | None
    max_model_len: int | None
    kv_memory: int | None
    max_batch: int
    max_step_tokens: int | None
    no_prefix_reuse: bool
    comm: str
    all_reduce: str
    share_gpus: bool
    shard_of: int | None
    graphs: bool
    threads: int | None
    is_ngram: bool
    draft_model: str | None
    num_drafts: int | None
    max_speculative_rows: int | None
    draft_kv_memory: int | None
    draft_placement: str
    draft_wait: str
    output_path: str | None
    is_openai: bool
    with_token_ids: bool
    resume: bool
    retry_failed: bool
    overwrite: bool
    strict: bool
    allow_failed_rows: bool
    is_stream: bool | None
    quiet: bool
    profile_path: str | None

    @property
    def is_single_prompt(self) -> bool:
        """One prompt, no files: the answer is printed as text."""
        return len(self.prompts) == 1 and self.output_path is None

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            model=self.model,
            load_format=self.load_format,
            device=self.device,
            dtype=self.dtype,
            comm=self.comm,
            all_reduce=self.all_reduce,
            is_gpu_sharing=self.share_gpus,
            shard_of=self.shard_of,
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory,
            max_batch=self.max_batch,
            max_step_tokens=self.max_step_tokens,
            is_prefix_reuse=not self.no_prefix_reuse,
            threads=self.threads,
            is_ngram=self.is_ngram,
            draft_model=self.draft_model,
            num_drafts=self.num_drafts,
            max_speculative_rows=self.max_speculative_rows,
            draft_kv_memory_bytes=self.draft_kv_memory,
            draft_placement=self.draft_placement,
            draft_wait=self.draft_wait,
            is_eager=not self.graphs,
            is_profiled=self.profile_path is not None,
        )

    def sampling_options(self) -> dict[str, object]:
        """The sampling flags that were given, under the names a row uses."""
        given: dict[str, object] = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "ignore_eos": self.ignore_eos or None,
            "include_stop_str": self.include_stop_str or None,
            "skip_special_tokens": False if self.keep_special_tokens else None,
            "n": self.n,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "logit_bias": dict(self.logit_bias) or None,
        }
        return {name: value for name, value in given.items() if value is not None}
