"""The picture of a run: one HTML page, or the same figures as PNG files."""

from grain_sparsecore.report.page import report_html as report_html
from grain_sparsecore.report.page import write_report as write_report
from grain_sparsecore.report.png import write_plots as write_plots
from grain_sparsecore.report.record import RunRecord as RunRecord
