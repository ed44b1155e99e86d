"""Around the run: configuration, checks before the start, logs, timing, report, checkpoint rotation.

schema.py      base class of every section of the configuration; config_*.py are the parts of config.py
config.py      the one loader of configuration files
preflight.py   checks of files and devices before anything is started
"""
