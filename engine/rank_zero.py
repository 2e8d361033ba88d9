"""What only rank 0 has: input, tokenizer, sampler, output, side file, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from comm.communicator import Communicator
from engine.command import CommandOptions
from engine.drafts.loading import build_speculation
from engine.drafts.speculation import Speculation
from engine.feed import Feed
from engine.frontend import Frontend, checked_seed
from engine.graph.loading import speculates_on_device
from engine.job import Counts, Job
from engine.leader import Leader
from engine.loading import Blueprint
from engine.output import STDOUT, OutputWriter
from engine.prepare import RowPreparer, fill_defaults, fresh_seed
from engine.profile.profile import Profile
from engine.profile.profiler import Profiler
from engine.profile.table import table_lines
from engine.profile.trace import write_trace
from engine.progress import Progress
from engine.refused import Refused
from engine.replica import Replica
from engine.resume import ResumeState, open_output
from engine.row_count import count_rows, is_read_once
from engine.rows import Row, RowError, read_rows
from engine.run_stats import RunStats
from engine.side_file import RunIdentity, input_identity
from engine.sinks import RowSink, Sink, TextSink
from engine.summary import summary_lines
from engine.version import VERSION
from launch.errors import EXIT_OK, EXIT_ROWS_FAILED, OutputError, UsageError
from launch.exits import MEANINGS
from launch.threads import ThreadChoice

LOOK_AHEAD_BATCHES = 4  # rows that are open or ready, in batches: enough to choose from, few enough to start at once


class RankZero:
    """Made before the ranks are connected, so that whatever it refuses is refused before a peer waits.

    Call `open`, then `begin` once the replica exists, and `finish` at the end, however the run ended.
    """

    def __init__(self, options: CommandOptions, blueprint: Blueprint):
        self.options, self.blueprint = options, blueprint
        self.frontend = Frontend.load(blueprint, options.sampling_options(), not options.no_generation_config)
        self.speculation: Speculation | None = None
        self.run_seed = fresh_seed() if options.seed is None else checked_seed(options.seed)
        self.is_chat = self._choose_chat()
        self.stats = RunStats()
        self.look_ahead = LOOK_AHEAD_BATCHES * options.max_batch
        self.writer: OutputWriter | None = None
        self.side = None
        self.job: Job | None = None
        self.feed: Feed | None = None
        self.progress: Progress | None = None
        self._state: ResumeState | None = None
        self._profiler: Profiler | None = None
        self._profile: Profile | None = None

    # -- before the ranks are connected ------------------------------------------------------------------------------

    def _choose_chat(self) -> bool:
        options, has_template = self.options, self.frontend.text.has_chat_template
        if options.is_chat and not has_template:
            raise UsageError(f"--chat: the model in {options.model} has no chat template; use --raw")
        if options.is_chat is None:
            return bool(options.prompts) and has_template
        return options.is_chat

    def open(self) -> None:
        """Open the output and the side file. *Raises* `UsageError` or `OutputError`."""
        options = self.options
        output = STDOUT if options.output_path is None else options.output_path
        mode = "resume" if options.resume else "overwrite" if options.overwrite else "create"
        self.writer, self.side, self._state = open_output(
            output,
            mode=mode,
            identity=self._identity(),
            engine_version=VERSION,
            command=_plain(asdict(options)),
            input_source=self._input_source(),
            run_seed=self.run_seed,
            retry_failed=options.retry_failed,
        )
        if self.side is not None:
            self.run_seed = self.side.run_seed

    def _input_source(self) -> Path | int | None:
        path = self.options.input_path
        return None if path is None else 0 if path == "-" else Path(path)

    def _identity(self) -> RunIdentity:
        options, blueprint = self.options, self.blueprint
        if options.input_path is None:
            source: dict[str, object] = {"sha256": None, "prompts": list(options.prompts)}
        elif is_read_once(options.input_path):
            source = {"sha256": None}
        else:
            source = input_identity(options.input_path)
        checkpoint = blueprint.checkpoint
        model = {
            "config": blueprint.config.fingerprint,
            "weights": f"dummy {blueprint.settings.dummy_seed}" if checkpoint is None else checkpoint.fingerprint,
            "tokenizer": self.frontend.text.fingerprint,
            "dtype": "fp8" if blueprint.is_fp8 else str(blueprint.dtype),
            "max_model_len": blueprint.max_model_len,
            **({} if options.shard_of is None else {"shard_of": options.shard_of}),
        }
        settings = {
            "prompt_field": options.prompt_field,
            "system": options.system,
            "chat": self.is_chat,
            "limit": options.limit,
            "openai": options.is_openai,
            "token_ids": options.with_token_ids,
        }
        sampling = _plain(asdict(fill_defaults(self.frontend.defaults.params))) | {"seed": self.options.seed}
        return RunIdentity(model=model, input=source, sampling=sampling, settings=settings)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row | RowError]:
        options = self.options
        params = self.frontend.defaults.params
        if options.input_path is None:
            for index, prompt in enumerate(options.prompts[: options.limit]):
                yield Row(index, index + 1, None, None, params, prompt=prompt, system=options.system)
            return
        yield from read_rows(
            options.input_path,
            params,
            prompt_field=options.prompt_field,
            system=options.system,
            default_model=Path(options.model).name,
            limit=options.limit,
        )

    def _num_rows(self) -> int | None:
        options = self.options
        if options.input_path is None:
            total: int | None = len(options.prompts)
        else:
            total = count_rows(options.input_path)
        return total if total is None or options.limit is None else min(total, options.limit)

    def _preparer(self, max_tokens_total: int) -> RowPreparer:
        return self.frontend.preparer(max_tokens_total, self.run_seed, self.is_chat)

    def dry_run(self) -> int:
        """Print every row's rendered prompt, ids and effective options as JSON lines. Returns the exit code."""
        preparer = self._preparer(self.blueprint.max_model_len)
        writer = OutputWriter(STDOUT)
        num_failed = 0
        for row in self._rows():
            try:
                if isinstance(row, RowError):
                    raise Refused(row.code, row.message)
                request = preparer.request(row)
                record: dict[str, object] = {
                    "index": row.index,
                    "line": row.line,
                    "text": preparer.rendered(row),
                    "token_ids": request.prompt_ids,
                    "params": _plain(asdict(request.params)) | {"seed": request.seed},
                }
            except Refused as error:
                num_failed += 1
                record = {"index": row.index, "line": row.line, "error": {"code": error.code, "message": error.message}}
            writer.write(json.dumps(record, ensure_ascii=True).encode("ascii") + b"\n")
        return EXIT_ROWS_FAILED if num_failed else EXIT_OK

    # -- the run -----------------------------------------------------------------------------------------------------

    def load_progress(self) -> Callable[[int, int], None] | None:
        """Says every tenth of the weights, for models that take a while to read."""
        if self.options.quiet:
            return None
        last = [0]

        def show(done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if tenth > last[0] and total > 2**30:
                last[0] = tenth
                print(f"doorbell: loading weights, {10 * tenth} % of {total / 2**30:.1f} GiB a rank", file=sys.stderr, flush=True)

        return show

    def load_draft(self, comm: Communicator) -> None:
        """Load what proposes drafts, if rank 0 does; before the target, whose KV cache takes what is left."""
        is_on_device = speculates_on_device(self.blueprint.settings, self.blueprint.device, comm)
        self.speculation = build_speculation(self.blueprint, self.frontend.num_ids, is_on_device)

    def begin(self, replica: Replica, comm: Communicator, threads: ThreadChoice) -> None:
        """Print the summary and start reading rows."""
        limits = replica.scheduler.limits
        self._profiler = replica.profiler if isinstance(replica.profiler, Profiler) else None
        self.leader = Leader(self.frontend.text, limits.max_model_len, self.frontend.num_ids, self.speculation)
        if not self.options.quiet:
            lines = summary_lines(self.blueprint, self.frontend, replica, comm, threads, self.run_seed)
            print("\n".join(lines), file=sys.stderr, flush=True)
        is_quiet = self.options.quiet or self.options.is_single_prompt
        self.progress = Progress(self._num_rows(), len(self._state.done), self.stats, is_quiet=is_quiet)
        self.job = Job(self._preparer(limits.max_model_len), self._sink(), self.progress, self._state, self.options.strict)
        self.feed = Feed(self.job.requests(self._rows()), depth=self.look_ahead)

    def _sink(self) -> Sink:
        if self.options.is_single_prompt and not self.options.is_openai:
            is_stream = os.isatty(1) if self.options.is_stream is None else self.options.is_stream
            return TextSink(self.writer, is_stream)
        return RowSink(self.writer, Path(self.options.model).name, self.options.is_openai, self.options.with_token_ids)

    def exit_code(self) -> int:
        is_failure = self.job.counts.failed and not self.options.allow_failed_rows
        return EXIT_ROWS_FAILED if is_failure else EXIT_OK

    def write_profile(self) -> None:
        """If one was asked for, once all rows are answered. *Raises* `OutputError`."""
        if self._profiler is None:
            return
        self._profile = self._profiler.profile()
        try:
            write_trace(self._profile, 0, Path(self.options.profile_path))
        except OSError as error:
            raise OutputError(f"the profile could not be written to {self.options.profile_path}: {error.strerror}") from None

    def finish(self, code: int, message: str | None) -> None:
        """Close the output at a row boundary and write how the run ended. *Raises* `OutputError`."""
        if self.feed is not None:
            self.feed.close()
        if self.progress is not None:
            self.progress.close()
            if not self.options.quiet:
                self._print_end()
        if self.writer is not None:
            self.writer.close_at_boundary()
        if self.side is not None:
            counts = self.job.final_counts() if self.job is not None else Counts()
            speculation = None if self.speculation is None else self.speculation.stats.as_record()
            reason = message or MEANINGS[code]
            self.side.finish(counts=counts.as_record(), exit_code=code, reason=reason, speculation=speculation)

    def _print_end(self) -> None:
        counts, stats = self.job.counts, self.stats
        waits = f", {stats.waits_per_token:.3f} host waits a token" if self.blueprint.device.type == "cuda" else ""
        resumed = f" ({counts.skipped} from before)" if counts.skipped else ""
        print(
            f"doorbell: {counts.ok} rows answered, {counts.failed} failed{resumed}; "
            f"prefill {stats.prefill_tokens} tokens at {stats.prefill_tok_s:.0f} tok/s, "
            f"decode {stats.decode_tokens} tokens at {stats.decode_tok_s:.1f} tok/s{waits}",
            file=sys.stderr,
            flush=True,
        )
        if self.speculation is not None:
            print(f"doorbell: {self.speculation.stats.line()}", file=sys.stderr, flush=True)
        if self._profile is not None:
            lines = ["doorbell: profile of rank 0", *(f"  {line}" for line in table_lines(self._profile))]
            print("\n".join(lines), file=sys.stderr, flush=True)


def _plain(value: object) -> dict[str, object]:
    """Dataclass fields as JSON gives them back."""
    return json.loads(json.dumps(value))
