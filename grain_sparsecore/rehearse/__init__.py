"""The real TPU compiler on the real program, without a TPU."""

from grain_sparsecore.rehearse.cache import default_cache as default_cache
from grain_sparsecore.rehearse.caps import Caps as Caps
from grain_sparsecore.rehearse.caps import with_caps as with_caps
from grain_sparsecore.rehearse.compiler import Compiler as Compiler
from grain_sparsecore.rehearse.installation import versions as versions
from grain_sparsecore.rehearse.rehearsal import Rehearsal as Rehearsal
from grain_sparsecore.rehearse.rehearsal import StackRehearsal as StackRehearsal
from grain_sparsecore.rehearse.rehearsal import find_caps as find_caps
from grain_sparsecore.rehearse.rehearsal import rehearse as rehearse
from grain_sparsecore.rehearse.sample import sample_limits as sample_limits
from grain_sparsecore.rehearse.topologies import topology_by_name as topology_by_name
