"""Ranking models, each written for one device."""

from ziggurat.models.build import ModelConfig as ModelConfig
from ziggurat.models.build import build_model as build_model
from ziggurat.models.cost import Flops as Flops
from ziggurat.models.cost import ParameterCount as ParameterCount
from ziggurat.models.cost import flops_per_sample as flops_per_sample
from ziggurat.models.cost import num_parameters as num_parameters
from ziggurat.models.dcn_v2 import CrossConfig as CrossConfig
from ziggurat.models.dcn_v2 import CrossKind as CrossKind
from ziggurat.models.dcn_v2 import DCNv2 as DCNv2
from ziggurat.models.dcn_v2 import DCNv2Config as DCNv2Config
from ziggurat.models.dcn_v2 import Structure as Structure
from ziggurat.models.dense_inputs import NumericInput as NumericInput
from ziggurat.models.dlrm import DLRM as DLRM
from ziggurat.models.dlrm import DLRMConfig as DLRMConfig
from ziggurat.models.dlrm import Interaction as Interaction
from ziggurat.models.dnn import DNN as DNN
from ziggurat.models.dnn import DNNConfig as DNNConfig
from ziggurat.models.heads import HeadSharing as HeadSharing
from ziggurat.models.logistic_regression import LogisticRegression as LogisticRegression
from ziggurat.models.logistic_regression import LogisticRegressionConfig as LogisticRegressionConfig
from ziggurat.models.mlp import Activation as Activation
from ziggurat.models.mlp import Init as Init
from ziggurat.models.mlp import MLPConfig as MLPConfig
from ziggurat.models.mlp import Normalization as Normalization
from ziggurat.models.ranking_model import RankingModel as RankingModel
