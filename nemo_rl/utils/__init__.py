"""Around the run: configuration, checks before the start, logs, timing, report, checkpoints.

config.py           the one loader of configuration files; config_*.py and yaml_reader.py are its parts
schema.py           base class of every section of the configuration
preflight.py        checks of files and devices before anything is started; preflight_*.py are its parts
model_files.py      model directories on disk (no torch)
safe_files.py       reading files that somebody else wrote: regular, bounded, JSON of one meaning
checkpoint.py       checkpoint directories: written whole or not at all, verified, rotated
logger.py           metric sinks
system_monitor.py   load and memory of the driver's machine
timer.py            wall-clock time per phase of a step
progress.py         what a person sees during a run
run_summary.py      the few figures that a run comes down to
report.py           the HTML report of a run; report_plots.py draws its plots
directories.py      output directories
"""
