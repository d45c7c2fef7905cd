"""The list of faults as its page shows it: for each row one short sentence per cell.

`tests/fault_table.py` joins it with the outcomes of the tests, which bear the same row in their mark `fault`.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """What is done to the system, what it does, and what has to be done again."""

    fault: str
    outcome: str
    lost: str = "nothing"


_STEPS = "the steps since the last checkpoint, which are repeated"
_SKIPPED = "with the policy `skip`, the damaged input"

FAULTS = {
    "1": Fault("No input file matches, or all inputs are empty", "Preparation stops with a clear error"),
    "2": Fault("An input is binary or invalid UTF-8", "The error names file and line or byte", _SKIPPED),
    "3": Fault("A compressed input is truncated or has the wrong extension", "The error names the real type", _SKIPPED),
    "4": Fault("A JSON line is broken or lacks the text field", "The error names each line", _SKIPPED),
    "5": Fault(
        "A line has 1 GB, or a word 10 MB", "Memory stays bounded and the line is counted", "the oversized line"
    ),
    "6": Fault(
        "Every document is empty after cleaning, or a duplicate", "Drops are counted and nothing left is an error"
    ),
    "7": Fault("A text has rare Unicode or a literal `[MASK]`", "The text round-trips and `[MASK]` stays text"),
    "8": Fault("The vocabulary is too large or too small for the corpus", "The error states the possible range"),
    "9": Fault("A Parquet file lacks the column or has nested types", "The error lists the columns"),
    "10": Fault("Two sources share a file, or an input changes between runs", "Preparation reports it"),
    "11": Fault(
        "SIGKILL hits preparation at 20 random moments", "The same command ends with the same bytes", "unfinished units"
    ),
    "12": Fault("A Dask worker or pool worker is killed", "Another worker repeats its units"),
    "13": Fault("The disk is full at any write of preparation", "It stops, and resumes once there is space"),
    "14": Fault(
        "S3 fails, throttles, resets or dies during uploads", "Requests are retried and no torn object appears"
    ),
    "15": Fault("Two preparations use one output directory", "The second is refused and names the first"),
    "16": Fault("The output directory is not writable", "The error comes before any work"),
    "17": Fault(
        "A shard is missing, truncated or flipped during training",
        "Every rank reports it and none hangs",
        "with `skip`, the rows of that shard",
    ),
    "18": Fault("A manifest or index is newer, damaged or edited", "Every rank stops with a clear error"),
    "19": Fault("The tokenizer differs from the shards' tokenizer", "Training is refused with both fingerprints"),
    "20": Fault("Token ids exceed the vocabulary", "Reading refuses them before any device-side assert"),
    "21": Fault(
        "The data is smaller than a batch, or one shard serves four readers", "The first is an error, the second works"
    ),
    "22": Fault(
        "The shard cache is full, or its store is away for a minute", "Old copies are evicted and reads are retried"
    ),
    "23": Fault(
        "SIGKILL hits a rank in a step or save, at ZeRO 0 to 3",
        "The others exit and the resume is bitwise exact",
        _STEPS,
    ),
    "24": Fault("The newest checkpoints are torn or flipped", "All ranks agree on the newest whole one", _STEPS),
    "25": Fault("A run resumes on other ranks and another ZeRO stage", "The losses agree within rounding", _STEPS),
    "26": Fault("A run resumes with changed settings, data or torch", "Incompatible changes are refused with a diff"),
    "27": Fault(
        "The disk or store is full when a checkpoint is saved",
        "The last checkpoint stays and a warning names it",
        _STEPS,
    ),
    "28": Fault(
        "Ranks get SIGTERM, SIGINT or SIGUSR1, or a second signal",
        "They save the same step and exit with 75",
        "after a second signal, " + _STEPS,
    ),
    "28b": Fault("The launcher or torchrun is killed", "The ranks save and exit on every host"),
    "29": Fault(
        "A rank is stopped or killed under the launcher", "It is named within the timeout and all exit", _STEPS
    ),
    "30": Fault(
        "Loss or gradient is not finite, or the loss spikes",
        "The step is skipped, counted and reported",
        "the skipped steps",
    ),
    "31": Fault("The network between two hosts is cut", "Both sides name the other rank and exit", _STEPS),
    "31b": Fault("A rank hangs inside a collective, at ZeRO 0 to 3", "The other rank names it and exits", _STEPS),
    "32": Fault("The MLflow server fails, is slow or is unreachable", "Every point arrives later, in order and once"),
    "33": Fault("The registry refuses, or the MLflow run was deleted", "Training continues and the files stay on disk"),
    "34": Fault("The first step runs out of memory", "The error names the settings to lower"),
    "35": Fault("A killed build leaves its lock in the op cache", "`clozeworks doctor` names the lock"),
    "36": Fault(
        "A setting is unknown, of the wrong type or out of range", "One paragraph names it before any rank starts"
    ),
    "37": Fault("An export meets NaN weights, a torn checkpoint or a used directory", "The export is refused"),
    "38": Fault("The upload of a model version breaks", "No alias moves and the same command completes it"),
    "39": Fault("Two registrations of one name run at once", "Both versions are whole"),
    "40": Fault(
        "Labeled data lacks labels, columns or classes",
        "The error names file, column and row",
        "text beyond the model's positions",
    ),
    "41": Fault("A mask is in a long text, or in an unknown script", "The text is truncated around the mask"),
    "42": Fault(
        "A shard tar is hostile: path traversal, links, pickles, bombs", "It is refused and nothing is written or run"
    ),
    "43": Fault("A checkpoint contains a malicious pickle", "The pickle is never loaded"),
    "44": Fault("A YAML file has Python tags, interpolation or an anchor bomb", "No code runs and the file is refused"),
    "45": Fault("A tokenizer file is crafted or truncated", "The error names the file"),
    "46": Fault("A registered model asks for trust_remote_code", "Its code is not run"),
    "47": Fault("URL, environment or configuration contain passwords", "No log, run, artifact or error shows them"),
    "47b": Fault("The environment of a launch on several hosts has secrets", "No command line shows them"),
    "48": Fault("File names, host names or settings have shell metacharacters", "They are passed as data"),
    "49": Fault("One rank has other settings", "All ranks exit with 2 and print the difference"),
    "50": Fault("One rank has other data or code", "All ranks exit before the first step and print it"),
    "51": Fault(
        "The output directory is not shared between hosts",
        "The run is refused unless `checkpoint.upload_to` is set",
        "steps that no checkpoint holds",
    ),
    "52": Fault("`MASTER_ADDR` or a host cannot be reached", "It is retried, then all exit with 76"),
    "53": Fault("A save is due while steps are not finite", "The last good checkpoint stays", "the skipped steps"),
    "54": Fault("A data worker is killed", "All ranks exit with 76 and the resume is bitwise exact", _STEPS),
    "55": Fault("The fork server of preparation is killed", "The same command ends with the same bytes"),
    "56": Fault(
        "An input is rewritten with the same size and time",
        "Its units are done again; a finished data set is refused with the list of changed files",
    ),
    "57": Fault("A document of 60 MB has no space", "Memory stays within the stated bound"),
    "58": Fault(
        "A finished set has a damaged shard", "It is reported, with the command that makes the same bytes elsewhere"
    ),
    "59": Fault("NVML fails (simulated on the CPU)", "Training continues without its metrics"),
    "60": Fault("Every rank is killed", "`clozeworks status` reports the run as dead", _STEPS),
    "61": Fault("Hosts differ in what compilation needs", "All ranks compile or none does"),
    "62": Fault(
        "SIGTERM while something is evaluated",
        "The step is saved, the partial scores are dropped and the next start evaluates it",
    ),
    "63": Fault("Source is edited between start and resume", "The edited files are listed, the diff is an artifact"),
    "64": Fault(
        "A filter, format or parameter file is edited in a living process",
        "The new content is used, or the work is refused",
    ),
    "65": Fault("An addition lacks the filters of the data set", "They are inherited, or it is refused with the list"),
    "66": Fault("A takedown lists values that are not present", "They are remembered and additions leave them out"),
    "67": Fault(
        "A name in a folder or store has characters of patterns and URLs",
        "It is taken literally, or refused before any work",
    ),
    "68": Fault(
        "A setting has ` #`, `&`, `~` or `$NAME`, or looks like a number, date or Boolean value",
        "It arrives as typed, or is refused",
    ),
    "69": Fault("An evaluation in which nothing is masked", "A line says so and training continues"),
    "70": Fault("Labels of a regression have any scale, offset and sign", "They are fitted to the same quality"),
    "71": Fault(
        "Texts of a table have control characters, line separators or no quoting",
        "What is written reads back the same, or is refused",
    ),
    "72": Fault(
        "A web server gives no ranges or no length", "A file is fetched once, or one error says what is missing"
    ),
    "73": Fault(
        "An id is a date, a time, uint64 or bytes",
        "It is the same in every format and installation",
        "with `skip`, rows whose bytes are not UTF-8",
    ),
    "74": Fault("Two preparations in one process have different credentials", "Each keeps its own"),
    "75": Fault("A rank holds only padding of a parameter group", "Every optimizer steps, saves and loads"),
    "76": Fault("A push to the Hub is killed, or the Hub fails", "The same command completes each revision, sent once"),
    "77": Fault("An ONNX export is killed, wrong or fills the disk", "Nothing has the final name"),
}
