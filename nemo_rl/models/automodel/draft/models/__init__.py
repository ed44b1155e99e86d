"""The drafts' modules, one file per family. Import them by file; this package must stay cheap to import."""
