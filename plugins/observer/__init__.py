"""The built-in observers (hook `minisgl_observer` and the event hooks), one file each."""
